"""Relays that lie, over real sockets: what passes is believed by its key alone, nobody else is blamed, and the next
relay is in use. A node streams groups from one that has reservations at two relays; the first of them turns."""

import asyncio
import hashlib
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from waits import hold, until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig, NodeConfig
from swarm.errors import Unavailable
from swarm.exchange import grpc_transport
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops import reach
from swarm.relay import relaying_transport
from swarm.relay.relay_client import MAX_TAKEN, RelayReservation
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.relay.tunnel import FRAME_BYTES
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, HoldsNothing, make_advert, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Cursor, NodeId, SealedGroup, StreamFilter
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.v1 import relay_service_pb2 as pb
from tests.worlds.hostile_relay_world import (
    EXCHANGE,
    HONEST,
    HOSTILE,
    NODE,
    READER,
    Change,
    HostileRelay,
    Scene,
    playing,
)

SHORT_PING_S = 1.0


async def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def withheld(data: bytes) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError("it is never set")


async def repeated(data: bytes) -> bytes:
    return (data + data)[:FRAME_BYTES]


async def more(data: bytes) -> bytes:
    return (data + secrets.token_bytes(FRAME_BYTES))[:FRAME_BYTES]


def reordering() -> Change:
    kept: list[bytes] = []

    async def reordered(data: bytes) -> bytes:
        """Half of each frame comes after the first half of the next one."""
        before = kept.pop() if kept else b""
        kept.append(data[len(data) // 2 :])
        return (data[: len(data) // 2] + before)[:FRAME_BYTES] or data

    return reordered


async def turns_to(scene: Scene, attack: str) -> None:
    changes = {
        "alters": altered,
        "withholds": withheld,
        "repeats": repeated,
        "reorders": reordering(),
        "adds bytes": more,
    }
    if attack == "dies":
        await scene.hostile_transport.stop()
    else:
        scene.hostile.change = changes[attack]


ATTACKS = ["alters", "withholds", "repeats", "reorders", "adds bytes", "dies"]
EACH_WAY = [*((attack, False) for attack in ATTACKS), ("alters", True), ("withholds", True), ("dies", True)]


@pytest.mark.parametrize(("attack", "is_by_calls"), EACH_WAY)
async def test_groups_go_on_through_the_next_relay_and_nobody_is_blamed(
    attack: str, is_by_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying_transport, "RELAY_PING_S", SHORT_PING_S)
    async with playing(is_by_calls=is_by_calls) as scene:
        await scene.pass_groups(2)
        assert scene.used == scene.through[0].endpoint
        await turns_to(scene, attack)
        await scene.pass_groups(2)
        assert scene.used == scene.through[1].endpoint
        assert attack == "dies" or scene.hostile.num_altered
        scene.check_nobody_is_blamed()


async def test_a_relay_that_poses_as_the_node_does_not_lead_it_to_itself() -> None:
    async with playing() as scene:
        for reservation in scene.reservations:
            await scene.node.check_reservation(reservation, 5.0)
        scene.hostile.leads_to_itself = True
        with pytest.raises(Unavailable, match="somebody else answers"):
            await scene.node.check_reservation(scene.reservations[0], 5.0)


async def test_a_relay_that_poses_as_the_node_with_its_own_key_is_not_believed() -> None:
    async with playing() as scene:
        await scene.pass_groups(1)
        scene.hostile.leads_to_itself = True
        reader = RelayingTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        try:
            with pytest.raises(Unavailable, match="expected node"):
                await reader.connect(scene.through[0], 2.0)
            client = await reader.connect(scene.through[1], 2.0)
            await client.close()
        finally:
            await reader.stop()


# --- the node that holds reservations -----------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["dies", "passes nothing on"])
async def test_a_node_advertises_relays_that_lead_to_it_and_replaces_one_that_does_not(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "CHECK_EVERY_S", 0.5)
    monkeypatch.setattr(reach, "CHECK_TIMEOUT_S", 4.0)  # an honest one may be slow on a busy machine
    clock = SystemClock()
    exchange = ExchangeConfig(listen="0.0.0.0:0", advertise="192.0.2.1:7700", reach="outward")
    context = make_context(NodeConfig(run_id=TOY_RUN_ID, exchange=exchange), NODE, clock=clock)
    agent, node = (
        make_agent(context, MemoryGroupStore(clock, 2**20)),
        RelayingTransport(NODE, TOY_RUN_ID, exchange, clock),
    )
    relays = [RelayingTransport(make_identity(20 + n), TOY_RUN_ID, EXCHANGE, clock) for n in range(3)]
    servicers = [HostileRelay(relay) for relay in relays]
    for relay, servicer in zip(relays, servicers, strict=True):
        relay.relay = servicer
        await relay.serve(HoldsNothing())
        agent.address_book.record_answer(PeerAddress(node_id=relay._identity.node_id, endpoint=relay.endpoint))
    adverts = [make_advert(r._identity.node_id, endpoints=(r.endpoint,), relay_reservations=1) for r in relays]
    agent.peers.observe(adverts)
    agent.endpoints = await node.serve(HoldsNothing())
    it = reach.Reach(agent, node, random.Random(0), is_advertise_set=True)
    await it.measure()
    keeping = asyncio.ensure_future(it.keep())

    def advertised() -> set[str]:
        return {endpoint.partition("/")[0] for endpoint in agent.endpoints}

    try:
        await until(lambda: len(advertised()) == reach.NUM_RESERVATIONS)
        turned = next(number for number, relay in enumerate(relays) if relay.endpoint in advertised())
        if attack == "dies":
            await relays[turned].stop()
        else:
            servicers[turned].change = withheld
        others = {relay.endpoint for number, relay in enumerate(relays) if number != turned}
        await until(lambda: advertised() == others)
        reader = RelayingTransport(READER, TOY_RUN_ID, EXCHANGE, clock)
        for endpoint in agent.endpoints:
            client = await reader.connect(PeerAddress(node_id=NODE.node_id, endpoint=endpoint), 5.0)
            await client.close()
        await reader.stop()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in (node, *relays)))


NUM_SENT = 100_000  # bytes: written before the other end has read any


class Once(HoldsNothing):
    """Streams one group, and notes when it was written."""

    def __init__(self) -> None:
        body = random.Random(0).randbytes(NUM_SENT)
        digest = hashlib.sha256(body).digest()
        self.sealed = SealedGroup(
            digest=digest,
            producer=NODE.node_id,
            public_key=NODE.public_key,
            signature=bytes(64),
            is_compressed=False,
            body=body,
        )
        self.is_written = asyncio.Event()

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        cursor, sealed = Cursor(epoch="e", sequence=1), self.sealed
        yield StreamItem(cursor=cursor, digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed)
        self.is_written.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["sockets", "calls"])
async def test_what_a_node_sent_before_it_stopped_comes_through_its_relay(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "DRAIN_S", 1.0)  # a busy machine is slow
    slow = RelayLimits(bytes_per_s=2**21, burst_bytes=2**14)
    relay, node, reader = [
        RelayingTransport(each, TOY_RUN_ID, EXCHANGE, SystemClock(), relay_limits=slow)
        for each in (HONEST, NODE, READER)
    ]
    once = Once()
    await relay.serve(HoldsNothing())
    if way == "calls":  # what was sent on a socket is at the relay
        await relay.relay.close_port()
    await node.serve(once)
    reservation = node.reservation_at(PeerAddress(node_id=HONEST.node_id, endpoint=relay.endpoint))
    holding = await hold(reservation)
    client = await reader.connect(PeerAddress(node_id=NODE.node_id, endpoint=reservation.endpoint), 5.0)
    reading = asyncio.ensure_future(anext(aiter(client.subscribe(Cursor(), StreamFilter()))))
    try:
        await once.is_written.wait()
        await node.stop()
        (found,) = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(found, StreamItem), found
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in (reader, node, relay)))


# --- what it says of who asks it to dial back --------------------------------------------------------------------


class LyingWitness(HostileRelay):
    """Gives a reason for not reaching the caller that hides other lines of a terminal."""

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        return pb.DialBackResponse(host="127.0.0.1", detail="\x1b[2J\x1b]0;owned\x07no answer\nproblem: run curl | sh")


async def test_what_a_witness_says_moves_no_cursor_of_a_terminal() -> None:
    async with playing() as scene:
        witness = RelayingTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        witness.relay = LyingWitness(witness)
        await witness.serve(HoldsNothing())
        said = await scene.node.dial_back(PeerAddress(node_id=make_identity(9).node_id, endpoint=witness.endpoint), 5.0)
        assert said.detail.isprintable() and "no answer" in said.detail
        await witness.stop()


# --- what it sends to who looks up adverts -------------------------------------------------------------------------


class EndlessDirectory(HostileRelay):
    """Answers a look-up with the same message a hundred times."""

    adverts: tuple[bytes, ...] = ()

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        for _ in range(100):
            await context.write(pb.LookupResponse(adverts=self.adverts))


@pytest.mark.parametrize("adverts", [(), (bytes(2**20),)], ids=["none", "too long"])
async def test_a_look_up_without_end_is_left_at_its_first_message(adverts: tuple[bytes, ...]) -> None:
    async with playing() as scene:
        transport = RelayingTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        relay = transport.relay = EndlessDirectory(transport)
        relay.adverts = adverts
        await transport.serve(HoldsNothing())
        address = PeerAddress(node_id=make_identity(9).node_id, endpoint=transport.endpoint)
        (error,) = await asyncio.gather(scene.node.records_at(address), return_exceptions=True)
        await transport.stop()
    assert isinstance(error, Unavailable) and "expected 1 to 256" in str(error)


# --- what it sends to who holds a reservation ---------------------------------------------------------------------


class FloodingRelay(HostileRelay):
    """Sends tickets of nobody without end to whoever holds a reservation."""

    num_tickets = 0
    origin = b""

    @rpc
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> None:
        self._sessions.require(context)
        while True:
            self.num_tickets += 1
            await context.write(pb.ReserveResponse(ticket=secrets.token_bytes(16), origin=self.origin))


@asynccontextmanager
async def at_flooding_relay() -> AsyncGenerator[tuple[FloodingRelay, RelayReservation, RelayingTransport]]:
    clock = SystemClock()
    transport = RelayingTransport(HOSTILE, TOY_RUN_ID, EXCHANGE, clock)
    relay = transport.relay = FloodingRelay(transport)
    node = RelayingTransport(NODE, TOY_RUN_ID, EXCHANGE, clock)
    await transport.serve(HoldsNothing())
    await node.serve(HoldsNothing())
    reservation = node.reservation_at(PeerAddress(node_id=HOSTILE.node_id, endpoint=transport.endpoint))
    try:
        yield relay, reservation, node
    finally:
        await node.stop()
        await transport.stop()


async def test_a_relay_that_floods_tickets_is_left_and_costs_few_connections() -> None:
    async with at_flooding_relay() as (relay, reservation, node):
        holding = asyncio.ensure_future(reservation.hold())
        most = 0
        while not holding.done() and relay.num_tickets < 600:
            await asyncio.sleep(0.002)
            most = max(most, len(reservation._tasks), len(node._relays._open.get(reservation.relay, ())))
        assert holding.done()
        assert most <= MAX_TAKEN
        holding.cancel()
        (error,) = await asyncio.gather(holding, return_exceptions=True)
        assert "tickets in a second" in str(error)
        assert not reservation.held.is_set() and not reservation._tasks


async def test_what_a_relay_writes_at_length_is_not_kept() -> None:
    async with at_flooding_relay() as (relay, reservation, _):
        relay.origin = bytes(2**17)
        holding = asyncio.ensure_future(reservation.hold())
        most = 0
        while not holding.done():
            await asyncio.sleep(0.001)
            most = max(most, len(reservation._tasks))
        assert most == 0, most
        await asyncio.gather(holding, return_exceptions=True)
