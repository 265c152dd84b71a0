"""Givers before takers: where a node cannot send all it has, those who give groups are served first."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from swarm.clock import ManualClock
from swarm.exchange.exchange_servicer import STREAMS_PER_PEER
from swarm.interfaces import PeerAddress, StreamItem
from swarm.peers.reputation import Reputation
from swarm.peers.send_order import STUCK_S, SendOrder
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Cursor, NodeId, ScoredGroup, StreamFilter

SERVER = make_identity(1)
GIVERS = [make_identity(10 + number).node_id for number in range(2)]
RIDERS = [make_identity(50 + number).node_id for number in range(6)]
SECONDS = 120.0
Read = Callable[[NodeId, AsyncIterator[StreamItem]], Coroutine[Any, Any, None]]


class Uplink:
    """A node that makes a group each tenth of a second, and an uplink that carries so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.network = MemoryNetwork(1, FaultPlan(bytes_per_s=bytes_per_s))
        context = make_context(identity=SERVER, clock=self.clock)
        self.agent = make_agent(context, MemoryGroupStore(self.clock, 2**28))
        self.received = Counter[NodeId]()
        self.num_made = 0

    async def run(self, readers: dict[NodeId, Read], seconds: float = SECONDS, num_streams: int = 1) -> None:
        """`num_streams`: of each who reads slowly."""
        (endpoint,) = await MemoryTransport(self.network, SERVER.node_id).serve(self.agent.streams)
        address = PeerAddress(node_id=SERVER.node_id, endpoint=endpoint)
        tasks = [asyncio.create_task(self._make())]
        for node_id, read in readers.items():
            client = await MemoryTransport(self.network, node_id).connect(address, 5.0)
            for _ in range(num_streams if read == self.read_slowly else 1):
                tasks.append(asyncio.create_task(read(node_id, client.subscribe(Cursor(), StreamFilter()))))
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, node_id: NodeId, stream: AsyncIterator[StreamItem]) -> None:
        async for item in stream:
            self.received[node_id] += item.sealed is not None

    async def read_slowly(self, node_id: NodeId, stream: AsyncIterator[StreamItem]) -> None:
        async for item in stream:
            self.received[node_id] += item.sealed is not None
            await asyncio.sleep(0.9 * STUCK_S)

    async def _make(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.num_made += 1
            for giver in GIVERS:  # which are admitted elsewhere in an agent; here only that they were matters
                self.agent.reputation.record_good(giver)
            await self.agent.local.put(
                make_group(SERVER.node_id, task_id=self.num_made, created_at_s=self.clock.now_s())
            )


def played(bytes_per_s: float, *, slow: int = 0, seconds: float = SECONDS, num_streams: int = 1) -> Uplink:
    async def scene() -> Uplink:
        uplink = Uplink(bytes_per_s)
        readers: dict[NodeId, Read] = dict.fromkeys((*GIVERS, *RIDERS), uplink.read)
        readers |= dict.fromkeys(GIVERS[:slow], uplink.read_slowly)
        await uplink.run(readers, seconds, num_streams)
        return uplink

    return run_virtual(scene())


def test_a_free_rider_has_a_tenth_of_what_a_giver_has_of_an_uplink_that_is_full() -> None:
    uplink = played(bytes_per_s=8_000.0)
    givers, riders = ([uplink.received[node_id] for node_id in nodes] for nodes in (GIVERS, RIDERS))
    assert min(riders) > 0 and max(riders) <= 0.1 * min(givers), uplink.received
    assert sum(givers) > 4 * sum(riders)


def test_nobody_waits_where_the_uplink_carries_everything() -> None:
    uplink = played(bytes_per_s=1e6, seconds=30.0)
    assert all(uplink.received[node_id] >= uplink.num_made - 1 for node_id in (*GIVERS, *RIDERS))


def test_a_giver_that_reads_slowly_on_six_streams_holds_nobody_up() -> None:
    uplink = played(bytes_per_s=1e6, slow=1, seconds=30.0, num_streams=STREAMS_PER_PEER)
    assert all(uplink.received[node_id] >= 0.8 * uplink.num_made for node_id in RIDERS), uplink.received


def test_givers_of_one_subnet_that_read_slowly_are_one_giver() -> None:
    """Eight keys of one owner gave a group each, and take no item; two givers elsewhere are sent all there is."""
    clock, keys = ManualClock(), [f"{number}" * 64 for number in range(8)]

    def by_subnet(peer: NodeId) -> str:
        return "10.0.0.0/24" if peer in keys else peer

    order = SendOrder(Reputation(clock, 6000), clock, by_subnet)
    with ExitStack() as stack:
        for peer in (*GIVERS, *keys):
            stream = stack.enter_context(order.stream(peer))
            if peer in keys:
                stack.enter_context(order.item(stream, is_first=True))
            else:
                with order.item(stream, is_first=True):
                    pass
                order.has_all(stream)
        assert not order._is_busy()


async def test_who_passes_on_what_others_made_is_no_giver_and_who_made_it_is() -> None:
    agent = make_agent(make_context(identity=SERVER), MemoryGroupStore(ManualClock(), 2**24))
    maker, relay = make_identity(10), make_identity(50)
    group = make_sealed(make_group(maker.node_id), maker)
    assert isinstance(await agent.ingest.receive(group, via=relay.node_id), ScoredGroup)
    givers = [identity for identity in (maker, relay) if agent.streams._order.is_giver(identity.node_id)]
    assert givers == [maker]


async def test_a_giver_that_reads_nothing_holds_nobody_up() -> None:
    clock = ManualClock()
    order = SendOrder(Reputation(clock, 6000), clock)
    with order.stream(GIVERS[0]) as stuck, order.item(stuck, is_first=True):
        rider = asyncio.create_task(order.turn())
        await asyncio.sleep(0)
        assert not rider.done()
        clock.advance(STUCK_S)
        with order.stream(GIVERS[1]) as other, order.item(other, is_first=True):
            pass  # who waits looks again
        await rider


async def test_a_free_rider_that_fetches_waits_like_one_that_is_sent_to() -> None:
    agent = make_agent(make_context(identity=SERVER), MemoryGroupStore(ManualClock(), 2**24))
    await agent.local.put(make_group(SERVER.node_id))
    agent.reputation.record_good(GIVERS[0])
    giver = agent.streams.subscribe(GIVERS[0], Cursor(), StreamFilter())
    digest = (await anext(giver)).digest  # type: ignore[arg-type]
    rider = asyncio.create_task(agent.streams.fetch(RIDERS[0], digest))
    assert (await agent.streams.fetch(GIVERS[0], digest)).digest == digest
    assert not rider.done(), "the giver's item is still being sent"
    await giver.aclose()  # type: ignore[attr-defined]
    assert (await rider).digest == digest
