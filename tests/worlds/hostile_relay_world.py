"""A relay that lies, and its scene: a node with reservations at it and at an honest one, and a reader of its groups."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from waits import hold, until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig, NodeConfig
from swarm.exchange.agent import Agent
from swarm.flow import Signal
from swarm.interfaces import PeerAddress, PeerClient, StreamItem
from swarm.loops.neighbours import neighbours_loop
from swarm.relay.relay_client import RelayReservation
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, HoldsNothing, make_advert, make_group, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert, Cursor, NodeId, SealedGroup, StreamFilter
from swarm.wire.envelopes import seal_group
from swarm.wire.grpc_errors import Context

NODE, READER, HOSTILE, HONEST = (make_identity(number) for number in range(2, 6))
EXCHANGE = ExchangeConfig(lookup_every_s=0.1)
Change = Callable[[bytes], Awaitable[bytes]]


class HostileRelay(RelayServicer):
    """Passes on what `change` makes of it, once it has turned."""

    def __init__(self, transport: RelayingTransport) -> None:
        super().__init__(transport._sessions, SystemClock(), RelayLimits())
        self._own = transport
        self.change: Change | None = None
        self.num_altered = 0
        self.leads_to_itself = False

    def _frame(self, connection: Any, data: bytes) -> bytes | Awaitable[bytes]:
        if self.change is None:
            return super()._frame(connection, data)
        self.num_altered += 1
        return self.change(data)

    async def _join(self, context: Context, connection: Any, reservation: Any) -> None:
        if self.leads_to_itself:
            await self._dial(context, connection, self._own.endpoint)
        else:
            await super()._join(context, connection, reservation)


class Noted(RelayingTransport):
    """A transport that notes where it was asked to dial."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dials: list[PeerAddress] = []

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        self.dials.append(address)
        return await super().connect(address, timeout_s)


class Log(HoldsNothing):
    """Groups of the node, streamed from wherever a reader is."""

    def __init__(self) -> None:
        self._groups: list[SealedGroup] = []
        self._more = Signal()

    def add(self, group: SealedGroup) -> None:
        self._groups.append(group)
        self._more.fire()

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        at = cursor.sequence
        while True:
            await self._more.until(lambda at=at: at < len(self._groups))  # type: ignore[misc]
            sealed, at = self._groups[at], at + 1
            cursor = Cursor(epoch="e", sequence=at)
            yield StreamItem(cursor=cursor, digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed)


class Directory:
    def __init__(self, adverts: list[Advert]) -> None:
        self._adverts, self.num_lookups = adverts, 0

    async def lookup(self) -> list[Advert]:
        self.num_lookups += 1
        return self._adverts


class Scene:
    """A reader, a node, and the two relays between them."""

    agent: Agent
    reader: Noted
    log: Log
    directory: Directory
    hostile: HostileRelay
    hostile_transport: RelayingTransport
    node: RelayingTransport
    reservations: list[RelayReservation]  # of the node, at the hostile relay and the honest one
    through: list[PeerAddress]  # the same
    num_sent = 0

    async def pass_groups(self, count: int) -> None:
        """The node makes so many groups, and the reader admits them."""
        for _ in range(count):
            self.make_group()
        await until(lambda: self.agent.ingest.num_admitted >= self.num_sent)

    def make_group(self) -> None:
        self.num_sent += 1
        self.log.add(seal_group(make_group(NODE.node_id, task_id=10 * self.num_sent + 7), NODE))

    @property
    def used(self) -> str | None:
        """The endpoint at which the node proved its key last."""
        return self.agent.address_book.endpoint_of(NODE.node_id)

    def check_nobody_is_blamed(self) -> None:
        assert not any(self.agent.ingest.refusals.values())
        assert self.agent.address_book.num_false_claims(NODE.node_id) == 0
        assert all(self.agent.reputation.is_allowed(each.node_id) for each in (NODE, HOSTILE, HONEST))


@asynccontextmanager
async def playing(*, is_by_calls: bool = False) -> AsyncGenerator[Scene]:
    """`is_by_calls`: nobody reaches the ports of the relays, and bytes go by the calls."""
    clock, it = SystemClock(), Scene()
    transports = [RelayingTransport(each, TOY_RUN_ID, EXCHANGE, clock) for each in (HOSTILE, HONEST, NODE)]
    it.hostile_transport, _, node = transports
    it.node = node
    it.hostile = it.hostile_transport.relay = HostileRelay(it.hostile_transport)
    it.log = Log()
    context = make_context(NodeConfig(run_id=TOY_RUN_ID, exchange=EXCHANGE), READER)
    it.agent = make_agent(context, MemoryGroupStore(context.clock, 2**26))
    it.reader = Noted(READER, TOY_RUN_ID, EXCHANGE, clock)
    for transport in transports:
        await transport.serve(it.log if transport is node else HoldsNothing())
        if is_by_calls:
            await transport.relay.close_port()
    relays = [PeerAddress(node_id=t._identity.node_id, endpoint=t.endpoint) for t in transports[:2]]
    reservations = it.reservations = [node.reservation_at(relay) for relay in relays]
    it.through = [PeerAddress(node_id=NODE.node_id, endpoint=reservation.endpoint) for reservation in reservations]
    advert = make_advert(NODE.node_id, endpoints=tuple(reservation.endpoint for reservation in reservations))
    it.directory = Directory([advert])
    directory: Any = it.directory
    tasks = await asyncio.gather(*map(hold, reservations))
    tasks.append(asyncio.ensure_future(neighbours_loop(it.agent, it.reader, directory, random.Random(0))))
    try:
        yield it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in (it.reader, node, *transports[:2])))
