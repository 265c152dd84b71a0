"""Relays that lie, over real sockets: what passes is believed by its key alone, nobody else is blamed, and the next
relay is in use. A node streams groups from one that has reservations at two relays; the first of them turns."""

import asyncio
import hashlib
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attacked_node import until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig, NodeConfig
from swarm.errors import Unavailable
from swarm.exchange import grpc_transport
from swarm.exchange.agent import Agent
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.flow import Signal
from swarm.interfaces import PeerAddress, PeerClient, StreamItem
from swarm.loops import reach
from swarm.loops.neighbours import neighbours_loop
from swarm.peers.address_book import AddressBook
from swarm.relay import relay_client
from swarm.relay.relay_client import MAX_TAKEN, RelayReservation
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.reservation_table import RelayLimits
from swarm.relay.tunnel import FRAME_BYTES
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, HoldsNothing, make_advert, make_group, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert, Cursor, NodeId, SealedGroup, StreamFilter
from swarm.wire import session
from swarm.wire.envelopes import seal_group
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.session import AuthenticatedChannel
from swarm.wire.v1 import relay_service_pb2 as pb

pytestmark = pytest.mark.timeout(60)

NODE, READER, HOSTILE, HONEST = (make_identity(number) for number in range(2, 6))
SHORT_PING_S = 1.0
NUM_TRIES = 2  # through the first relay after it turned, by which a mutation has shown itself
EXCHANGE = ExchangeConfig(lookup_every_s=0.1, dial_timeout_s=2.0)
Change = Callable[[bytes], Awaitable[bytes]]


class HostileRelay(RelayServicer):
    """Passes on what `change` makes of it, once it has turned."""

    def __init__(self, transport: GrpcTransport) -> None:
        super().__init__(transport._sessions, SystemClock(), RelayLimits())
        self._own = transport
        self.change: Change | None = None
        self.num_altered = 0
        self.leads_to_itself = False

    async def _pass_on(self, connection: Any, read: Any, write: Any) -> None:
        async def changed() -> bytes:
            data = await read()
            if self.change is None or not data:
                return data
            self.num_altered += 1
            return await self.change(data)

        await super()._pass_on(connection, changed, write)

    async def _join(self, context: Context, connection: Any, reservation: Any) -> None:
        if self.leads_to_itself:
            await self._dial(context, connection, self._own.endpoint)
        else:
            await super()._join(context, connection, reservation)


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


class Noted(GrpcTransport):
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
    hostile_transport: GrpcTransport
    node: GrpcTransport
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
        """Where the node proved its key last."""
        return self.agent.address_book.endpoint_of(NODE.node_id)

    def check_nobody_is_blamed(self) -> None:
        assert not any(self.agent.ingest.refusals.values())
        assert self.agent.address_book.num_false_claims(NODE.node_id) == 0
        assert all(self.agent.reputation.is_allowed(each.node_id) for each in (NODE, HOSTILE, HONEST))


@asynccontextmanager
async def playing() -> AsyncGenerator[Scene]:
    clock, it = SystemClock(), Scene()
    transports = [GrpcTransport(each, TOY_RUN_ID, EXCHANGE, clock) for each in (HOSTILE, HONEST, NODE)]
    it.hostile_transport, _, node = transports
    it.node = node
    it.hostile = it.hostile_transport.relay = HostileRelay(it.hostile_transport)
    it.log = Log()
    context = make_context(NodeConfig(run_id=TOY_RUN_ID, exchange=EXCHANGE), READER)
    it.agent = make_agent(context, MemoryGroupStore(context.clock, 2**26))
    it.reader = Noted(READER, TOY_RUN_ID, EXCHANGE, clock)
    for transport in transports:
        await transport.serve(it.log if transport is node else HoldsNothing())
    relays = [PeerAddress(node_id=t._identity.node_id, endpoint=t.endpoint) for t in transports[:2]]
    reservations = it.reservations = [node.reservation_at(relay) for relay in relays]
    it.through = [PeerAddress(node_id=NODE.node_id, endpoint=reservation.endpoint) for reservation in reservations]
    advert = make_advert(NODE.node_id, endpoints=tuple(reservation.endpoint for reservation in reservations))
    it.directory = Directory([advert])
    directory: Any = it.directory
    tasks = [asyncio.ensure_future(reservation.hold()) for reservation in reservations]
    await asyncio.gather(*(reservation.held.wait() for reservation in reservations))
    tasks.append(asyncio.ensure_future(neighbours_loop(it.agent, it.reader, directory, random.Random(0))))
    try:
        yield it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in (it.reader, node, *transports[:2])))


def all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: a failure through a relay is no reason to try another one."""
    plain = AddressBook.record_failure

    def record_failure(self: AddressBook, address: PeerAddress, caller: str = "") -> None:
        if address.relay is None:
            plain(self, address, caller)

    monkeypatch.setattr(AddressBook, "record_failure", record_failure)


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


@pytest.mark.parametrize("attack", ATTACKS)
async def test_groups_go_on_through_the_next_relay_and_nobody_is_blamed(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "RELAY_PING_S", SHORT_PING_S)
    async with playing() as scene:
        await scene.pass_groups(2)
        assert scene.used == scene.through[0].endpoint
        await turns_to(scene, attack)
        await scene.pass_groups(2)
        assert scene.used == scene.through[1].endpoint
        assert attack == "dies" or scene.hostile.num_altered
        scene.check_nobody_is_blamed()


@pytest.mark.parametrize("attack", ["alters", "dies"])
async def test_mutation_where_a_failure_is_not_the_relays_it_is_tried_for_ever(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_the_same(monkeypatch)
    async with playing() as scene:
        await scene.pass_groups(2)
        await turns_to(scene, attack)
        scene.make_group()
        num_dials = len(scene.reader.dials)
        await until(lambda: scene.reader.dials[num_dials:].count(scene.through[0]) > NUM_TRIES)
        assert scene.used == scene.through[0].endpoint and scene.through[1] not in scene.reader.dials


async def test_mutation_with_grpcs_own_deadline_of_pings_a_relay_that_withholds_is_not_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_transport, "RELAY_PING_S", SHORT_PING_S)
    monkeypatch.setattr(session, "_prompt_options", lambda ping_s: [])  # type: ignore[arg-type]
    async with playing() as scene:
        await scene.pass_groups(2)
        await turns_to(scene, "withholds")
        scene.make_group()
        num_looks = scene.directory.num_lookups
        # as many look-ups as the defence needs several times over; gRPC's own deadline is a minute
        await until(lambda: scene.directory.num_lookups > num_looks + 5 * SHORT_PING_S / EXCHANGE.lookup_every_s)
        assert scene.used == scene.through[0].endpoint and scene.agent.ingest.num_admitted == 2


async def test_a_relay_that_poses_as_the_node_does_not_lead_it_to_itself() -> None:
    async with playing() as scene:
        for reservation in scene.reservations:
            await scene.node.check_reservation(reservation, 5.0)
        scene.hostile.leads_to_itself = True
        with pytest.raises(Unavailable, match="somebody else answers"):
            await scene.node.check_reservation(scene.reservations[0], 5.0)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: whoever answers"])
async def test_a_relay_that_poses_as_the_node_with_its_own_key_is_not_believed(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(AuthenticatedChannel, "_check_challenge", lambda *_: None)  # type: ignore[arg-type]
        monkeypatch.setattr("swarm.wire.server.verify", lambda *_: True)
    async with playing() as scene:
        await scene.pass_groups(1)
        scene.hostile.leads_to_itself = True
        reader = GrpcTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        try:
            if is_defended:
                with pytest.raises(Unavailable, match="expected node"):
                    await reader.connect(scene.through[0], 2.0)
                client = await reader.connect(scene.through[1], 2.0)
            else:
                client = await reader.connect(scene.through[0], 2.0)
            await client.close()
        finally:
            await reader.stop()


# --- what it says of who asks it to dial back --------------------------------------------------------------------


class LyingWitness(HostileRelay):
    """Says why it did not reach the caller in words that hide other lines of a terminal."""

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        return pb.DialBackResponse(host="127.0.0.1", detail="\x1b[2J\x1b]0;owned\x07no answer\nproblem: run curl | sh")


def as_it_came(text: str) -> str:
    """The defence taken out."""
    return text


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: as it came"])
async def test_what_a_witness_says_moves_no_cursor_of_a_terminal(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_client, "printable", as_it_came)
    async with playing() as scene:
        witness = GrpcTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        witness.relay = LyingWitness(witness)
        await witness.serve(HoldsNothing())
        said = await scene.node.dial_back(PeerAddress(node_id=make_identity(9).node_id, endpoint=witness.endpoint), 5.0)
        assert said.detail.isprintable() is is_defended and "no answer" in said.detail
        await witness.stop()


# --- what it sends to who looks up adverts -------------------------------------------------------------------------


class EndlessDirectory(HostileRelay):
    """Answers a look-up with the same message for ever."""

    adverts: tuple[bytes, ...] = ()
    num_messages = 0

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        while True:
            self.num_messages += 1
            await context.write(pb.LookupResponse(adverts=self.adverts))


def whatever_comes(adverts: object, what: str) -> None:
    """The defence taken out."""


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: whatever comes"])
@pytest.mark.parametrize("adverts", [(), (bytes(2**20),)], ids=["none", "too long"])
async def test_a_look_up_without_end_is_left_at_its_first_message(
    adverts: tuple[bytes, ...], is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_client, "_check_adverts", whatever_comes)
        monkeypatch.setattr(relay_client, "MAX_LOOKED_UP", 10**9)  # what was too long was not counted
    async with playing() as scene:
        transport = GrpcTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        relay = transport.relay = EndlessDirectory(transport)
        relay.adverts = adverts
        await transport.serve(HoldsNothing())
        address = PeerAddress(node_id=make_identity(9).node_id, endpoint=transport.endpoint)
        looking_up = asyncio.ensure_future(scene.node.records_at(address))
        if is_defended:
            with pytest.raises(Unavailable, match="expected at most 256"):
                await looking_up
        else:
            await until(lambda: relay.num_messages > 100)
            assert not looking_up.done()
            looking_up.cancel()
        await asyncio.gather(looking_up, return_exceptions=True)
        await transport.stop()


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
async def at_flooding_relay() -> AsyncGenerator[tuple[FloodingRelay, RelayReservation, GrpcTransport]]:
    clock = SystemClock()
    transport = GrpcTransport(HOSTILE, TOY_RUN_ID, EXCHANGE, clock)
    relay = transport.relay = FloodingRelay(transport)
    node = GrpcTransport(NODE, TOY_RUN_ID, EXCHANGE, clock)
    await transport.serve(HoldsNothing())
    await node.serve(HoldsNothing())
    reservation = node.reservation_at(PeerAddress(node_id=HOSTILE.node_id, endpoint=transport.endpoint))
    try:
        yield relay, reservation, node
    finally:
        await node.stop()
        await transport.stop()


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: tickets without end"])
async def test_a_relay_that_floods_tickets_is_left_and_costs_few_connections(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_client, "TICKETS_BURST", 1e9)
    async with at_flooding_relay() as (relay, reservation, node):
        holding = asyncio.ensure_future(reservation.hold())
        most = 0
        while not holding.done() and relay.num_tickets < 600:
            await asyncio.sleep(0.002)
            most = max(most, len(reservation._tasks), len(node._relays._open.get(reservation.relay, ())))
        assert holding.done() is is_defended
        assert most <= MAX_TAKEN
        holding.cancel()
        (error,) = await asyncio.gather(holding, return_exceptions=True)
        assert not is_defended or "tickets in a second" in str(error)
        assert not reservation.held.is_set() and not reservation._tasks


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: of any length"])
async def test_what_a_relay_writes_at_length_is_not_kept(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_client, "ORIGIN_BYTES", 2**20)
    async with at_flooding_relay() as (relay, reservation, _):
        relay.origin = bytes(2**17)
        holding = asyncio.ensure_future(reservation.hold())
        most = 0
        while not holding.done():
            await asyncio.sleep(0.001)
            most = max(most, len(reservation._tasks))
        assert (most == 0) is is_defended, most
        await asyncio.gather(holding, return_exceptions=True)


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
    agent, node = make_agent(context, MemoryGroupStore(clock, 2**20)), GrpcTransport(NODE, TOY_RUN_ID, exchange, clock)
    relays = [GrpcTransport(make_identity(20 + n), TOY_RUN_ID, EXCHANGE, clock) for n in range(3)]
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
        reader = GrpcTransport(READER, TOY_RUN_ID, EXCHANGE, clock)
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


def ways_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the connections to relays end before the streams that go through them."""
    plain = GrpcTransport.stop

    async def stop(self: GrpcTransport) -> None:
        await self.renew_connections()
        await plain(self)

    monkeypatch.setattr(GrpcTransport, "stop", stop)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: ways end first"])
async def test_what_a_node_sent_before_it_stopped_comes_through_its_relay(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "DRAIN_S", 1.0)  # a busy machine is slow
    if not is_defended:
        ways_end_first(monkeypatch)
    slow = RelayLimits(bytes_per_s=2**21, burst_bytes=2**14)
    relay, node, reader = [
        GrpcTransport(each, TOY_RUN_ID, EXCHANGE, SystemClock(), relay_limits=slow) for each in (HONEST, NODE, READER)
    ]
    once = Once()
    await relay.serve(HoldsNothing())
    await node.serve(once)
    reservation = node.reservation_at(PeerAddress(node_id=HONEST.node_id, endpoint=relay.endpoint))
    holding = asyncio.ensure_future(reservation.hold())
    await reservation.held.wait()
    client = await reader.connect(PeerAddress(node_id=NODE.node_id, endpoint=reservation.endpoint), 5.0)
    reading = asyncio.ensure_future(anext(aiter(client.subscribe(Cursor(), StreamFilter()))))
    try:
        await once.is_written.wait()
        await node.stop()
        (found,) = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(found, StreamItem) is is_defended, found
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in (reader, node, relay)))
