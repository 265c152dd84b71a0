"""What callers do to a relay, and through it to a node that cannot be dialled, over real sockets.

Each subnet is an address of 127/8. A mutation that takes a defence out turns its claim red.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import grpc
import pytest
from attacked_node import until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import SwarmError, Unavailable
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.fairness import FairTable
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.relay import relay_client, relay_servicer, reservation_table
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.reservation_table import RelayLimits, ReservationTable
from swarm.relay.tunnel import FRAME_BYTES
from swarm.testing.builders import HoldsNothing, make_advert, make_identity
from swarm.testing.call_flood import forwarding
from swarm.testing.connection_flood import loopback_addresses
from swarm.types import NodeId
from swarm.wire import server as wire_server
from swarm.wire.adverts import seal_advert
from swarm.wire.server import ServerLimits, Sessions
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1 import session_service_pb2
from swarm.wire.v1.relay_service_pb2_grpc import RelayServiceStub
from swarm.wire.v1.session_service_pb2_grpc import SessionServiceStub

pytestmark = pytest.mark.timeout(60)

RUN = "relay-floods"
RELAY, NODE = make_identity(1), make_identity(2)
HERE = "127.0.0.1"
ADDRESSES = loopback_addresses(64)
CODES = grpc.StatusCode
EOF: Any = cast(Any, grpc.aio).EOF


class Caller:
    """Somebody with a session at the relay, who calls as it likes."""

    def __init__(self, channel: AuthenticatedChannel, metadata: Any, identity: Identity) -> None:
        self.channel, self.metadata, self.identity = channel, metadata, identity
        self.stub: Any = RelayServiceStub(channel.channel)
        self.tickets = asyncio.Queue[bytes]()

    async def connect(self, node: Identity = NODE, first: Any = None) -> Any:
        """A connection that was asked for."""
        call = self.stub.Connect(metadata=self.metadata)
        await call.write(first or pb.ConnectRequest(node_id=node.node_id))
        return call

    async def accept(self, ticket: bytes) -> Any:
        call = self.stub.Accept(metadata=self.metadata)
        await call.write(pb.AcceptRequest(ticket=ticket))
        return call

    async def reserve(self) -> Any:
        """A reservation, whose tickets are put aside; None where there is none."""
        call = self.stub.Reserve(pb.ReserveRequest(), metadata=self.metadata)
        try:
            if (await call.read()) is EOF:
                return None
        except grpc.aio.AioRpcError as error:
            assert error.code() is CODES.UNAVAILABLE
            return None

        async def read() -> None:
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                while (response := await call.read()) is not EOF:
                    self.tickets.put_nowait(response.ticket)

        call.reading = asyncio.ensure_future(read())
        return call


class Relay:
    """A relay under attack."""

    def __init__(self, transport: GrpcTransport, stack: AsyncExitStack) -> None:
        self.transport, self.servicer, self._stack = transport, transport.relay, stack
        self.address = PeerAddress(node_id=RELAY.node_id, endpoint=transport.endpoint)

    async def caller(self, source: str = HERE, identity: Identity | None = None) -> Caller:
        """One with a fresh key, from an address."""
        identity = identity or Identity.create()
        endpoint = await self._stack.enter_async_context(forwarding(source, self.address.endpoint))
        channel = await open_channel(endpoint, RELAY.node_id, identity, RUN, 5.0)
        self._stack.push_async_callback(channel.close)
        return Caller(channel, await channel.metadata(5.0), identity)

    async def node(self, limits: ServerLimits | None = None) -> GrpcTransport:
        """A node that holds a reservation here."""
        transport = GrpcTransport(NODE, RUN, ExchangeConfig(), SystemClock(), limits)
        self._stack.push_async_callback(transport.stop)
        await transport.serve(HoldsNothing())
        reservation = transport.reservation_at(self.address)
        holding = asyncio.ensure_future(reservation.hold())

        async def end() -> None:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

        self._stack.push_async_callback(end)
        await reservation.held.wait()
        return transport

    async def reaches(self, source: str, timeout_s: float = 5.0) -> str:
        """Why nobody from there reaches the node with a session of its own; empty where somebody does."""
        endpoint = await self._stack.enter_async_context(forwarding(source, self.address.endpoint))
        transport = GrpcTransport(Identity.create(), RUN, ExchangeConfig(), SystemClock())
        try:
            through = PeerAddress(node_id=NODE.node_id, endpoint=f"{endpoint}/{RELAY.node_id}")
            client = await transport.connect(through, timeout_s)
            await client.close()
        except Unavailable as error:
            return str(error)
        finally:
            await transport.stop()
        return ""

    @property
    def num_connections(self) -> int:
        return int(self.servicer.status()["connections"])  # type: ignore[arg-type]


@asynccontextmanager
async def relaying(**limits: Any) -> AsyncGenerator[Relay]:
    async with AsyncExitStack() as stack:
        bounds = RelayLimits(**limits)
        transport = GrpcTransport(RELAY, RUN, ExchangeConfig(), SystemClock(), relay_limits=bounds)
        stack.push_async_callback(transport.stop)
        await transport.serve(HoldsNothing())
        yield Relay(transport, stack)


async def code_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(20.0):
        return await call.code()


# --- calls that are none ------------------------------------------------------------------------------------


async def test_calls_without_a_session_or_a_whole_first_message_end_and_hold_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_servicer, "FIRST_MESSAGE_S", 0.2)
    async with relaying() as relay:
        caller = await relay.caller()
        for method in ("Connect", "Accept"):
            stranger = getattr(caller.stub, method)()
            assert await code_of(stranger) is CODES.UNAUTHENTICATED
            assert await code_of(getattr(caller.stub, method)(metadata=caller.metadata)) is CODES.UNAVAILABLE, "late"
            ended = getattr(caller.stub, method)(metadata=caller.metadata)
            await ended.done_writing()
            assert await code_of(ended) is CODES.UNAVAILABLE
        for first in (
            pb.ConnectRequest(node_id="nobody"),
            pb.ConnectRequest(node_id=NODE.node_id, data=b"x"),
            pb.ConnectRequest(node_id=NODE.node_id, data=bytes(2**15)),
        ):
            assert await code_of(await caller.connect(first=first)) is CODES.RESOURCE_EXHAUSTED
        for nobody in (NODE, RELAY, caller.identity):
            assert await code_of(await caller.connect(nobody)) is CODES.NOT_FOUND
        assert relay.num_connections == 0 and not relay.servicer.table._connections_to


async def test_a_node_that_connects_to_itself_has_one_connection_and_its_end() -> None:
    async with relaying() as relay:
        caller = await relay.caller()
        await caller.reserve()
        near = await caller.connect(caller.identity)
        far = await caller.accept(await caller.tickets.get())
        await near.write(pb.ConnectRequest(data=b"round"))
        assert (await far.read()).data == b"round"
        assert relay.num_connections == 1
        far.cancel()
        assert await code_of(near) is CODES.OK
        assert relay.num_connections == 0


class Anybody:
    """A node id that no other differs from."""

    def __ne__(self, other: object) -> bool:
        return False


ASKED: Any = relay_servicer._Asked


def of_anybody(node_id: NodeId, taken: Any) -> Any:
    """Mutation: whoever shows a ticket has it."""
    return ASKED(Anybody(), taken)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: of anybody"])
async def test_a_ticket_is_good_once_and_for_its_node_alone(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_servicer, "_Asked", of_anybody)
    async with relaying() as relay:
        node, thief, caller = [await relay.caller() for _ in range(3)]
        await node.reserve()
        await thief.reserve()
        asking = await caller.connect(node.identity)
        ticket = await node.tickets.get()
        stolen = await thief.accept(ticket)
        if not is_defended:
            await asking.write(pb.ConnectRequest(data=b"to whom?"))
            assert (await stolen.read()).data == b"to whom?"
            return
        assert await code_of(stolen) is CODES.NOT_FOUND
        assert await code_of(await thief.accept(secrets.token_bytes(16))) is CODES.NOT_FOUND
        taken = await node.accept(ticket)
        await asking.write(pb.ConnectRequest(data=b"hello"))
        assert (await taken.read()).data == b"hello"
        assert await code_of(await node.accept(ticket)) is CODES.NOT_FOUND


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: nobody counts"])
async def test_who_shows_tickets_on_and_on_is_cut_and_who_was_told_of_callers_that_left_is_not(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_counts(self: Sessions, peer: str, error: SwarmError, num: int = 1) -> SwarmError:
        return error

    if not is_defended:
        monkeypatch.setattr(Sessions, "refused", nobody_counts)
    monkeypatch.setattr(relay_servicer, "ACCEPT_S", 0.05)
    monkeypatch.setattr(wire_server, "REFUSALS_BURST", 6.0)
    num_shown = 40
    async with relaying() as relay:
        node, attacker, caller = (
            await relay.caller(ADDRESSES[0]),
            await relay.caller(ADDRESSES[1]),
            await relay.caller(),
        )
        await node.reserve()
        for _ in range(num_shown // 2):
            assert await code_of(await caller.connect(node.identity)) is CODES.UNAVAILABLE  # nobody took it
            assert await code_of(await node.accept(await node.tickets.get())) is CODES.NOT_FOUND
        assert relay.servicer.status()["reservations"] == 1, "it goes on"
        codes: list[grpc.StatusCode] = []

        async def show() -> None:
            call = attacker.stub.Accept(metadata=attacker.metadata)
            try:
                await call.write(pb.AcceptRequest(ticket=secrets.token_bytes(16)))
                codes.append(await call.code())
            except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                codes.append(CODES.UNAVAILABLE)

        await asyncio.gather(*(show() for _ in range(num_shown)))
        assert (codes.count(CODES.NOT_FOUND) < num_shown // 2) is is_defended


# --- bounds that others fill --------------------------------------------------------------------------------


def newcomers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: where all is taken, whoever comes is turned away."""
    monkeypatch.setattr(FairTable, "longest", lambda self, beside: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: newcomers are refused"])
@pytest.mark.parametrize("bound", ["connections", "connections_per_node"])
async def test_free_keys_of_a_few_subnets_keep_nobody_else_from_a_node(
    bound: str, is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        newcomers_are_refused(monkeypatch)
    async with relaying(**{bound: 12}) as relay:
        node = await relay.caller()
        await node.reserve()
        attackers = [await relay.caller(source) for source in ADDRESSES[:3] for _ in range(2)]
        held = [await attacker.connect(node.identity) for attacker in attackers for _ in range(2)]
        taken = [await node.accept(await node.tickets.get()) for _ in held]
        await until(lambda: relay.num_connections == 12)
        honest = await relay.caller(ADDRESSES[9])
        asking = await honest.connect(node.identity)
        if not is_defended:
            assert await code_of(asking) is CODES.UNAVAILABLE
            return
        far = await node.accept(await node.tickets.get())
        await asking.write(pb.ConnectRequest(data=b"hello"))
        assert (await far.read()).data == b"hello"
        assert relay.num_connections == 12 and len(taken) == 12
        ended = [call for call in held if call.done()]
        assert len(ended) <= 1


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: newcomers are refused"])
async def test_free_keys_of_one_subnet_take_few_reservations_and_make_room(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        newcomers_are_refused(monkeypatch)
    async with relaying(reservations=6, reservations_per_subnet=4) as relay:
        for source, num_reservations in ((ADDRESSES[0], 4), (ADDRESSES[1], 2)):
            for _ in range(num_reservations):
                await (await relay.caller(source)).reserve()
        assert await (await relay.caller(ADDRESSES[0])).reserve() is None, "its subnet has enough"
        newcomer = await relay.caller(ADDRESSES[2])
        assert (await newcomer.reserve() is not None) is is_defended
        assert relay.servicer.status()["reservations"] == 6


async def test_an_established_node_has_a_reservation_where_strangers_of_its_network_have_all() -> None:
    known = make_identity(7)
    async with relaying(reservations_per_subnet=3) as relay:
        relay.servicer.table._standing = lambda node_id: int(node_id == known.node_id)
        strangers = [await relay.caller() for _ in range(3)]
        for stranger in strangers:
            await stranger.reserve()
        await (await relay.caller(identity=known)).reserve()
        assert relay.servicer.status()["reservations"] == 3 and known.node_id in relay.servicer.table._held


async def test_a_second_process_of_a_node_takes_its_reservation_and_nothing_of_others() -> None:
    async with relaying() as relay:
        first, other = await relay.caller(identity=NODE), await relay.caller()
        await other.reserve()
        held = await first.reserve()
        second = await relay.caller(ADDRESSES[3], identity=NODE)
        for _ in range(5):
            await second.reserve()
        assert await code_of(held) is CODES.UNAVAILABLE
        assert set(relay.servicer.table._held) == {NODE.node_id, other.identity.node_id}


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: without a rate"])
async def test_connections_asked_for_without_end_cost_a_node_few(is_defended: bool) -> None:
    rate = {} if is_defended else {"asks_per_s": 1e6, "asks_burst": 1e6}
    async with relaying(**({"asks_per_s": 1.0, "asks_burst": 16.0} | rate)) as relay:
        node = await relay.caller(ADDRESSES[0])
        await node.reserve()
        for _ in range(4):  # keys are free
            attacker = await relay.caller(ADDRESSES[1])
            for _ in range(16):
                call = attacker.stub.Connect(metadata=attacker.metadata)
                try:
                    await call.write(pb.ConnectRequest(node_id=node.identity.node_id))
                    await asyncio.sleep(0.002)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    continue
                call.cancel()
        assert (node.tickets.qsize() <= 20) is is_defended


def nobody_asks_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: who asks for a connection is not counted."""
    monkeypatch.setattr(ReservationTable, "count_ask", lambda self, subnet, now_s: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: nobody counts"])
async def test_who_asks_for_nodes_that_are_not_here_is_counted_as_well(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        nobody_asks_too_often(monkeypatch)
    async with relaying(asks_per_s=0.1, asks_burst=16.0) as relay:
        attacker = await relay.caller(ADDRESSES[1])
        codes = [await code_of(await attacker.connect(Identity.create())) for _ in range(19)]
        assert codes[:16] == 16 * [CODES.NOT_FOUND]
        assert (CODES.UNAVAILABLE in codes) is is_defended


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: as many as ask"])
async def test_callers_of_a_few_subnets_do_not_make_a_relay_look_as_if_it_flooded(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_servicer, "TICKETS_BURST", 1e9)
    async with relaying() as relay:
        await relay.node()
        table = relay.servicer.table
        held = table.get(NODE.node_id)

        async def flood(source: str) -> None:
            attacker = await relay.caller(source)
            for _ in range(220 if is_defended else 2000):  # on a busy machine it takes more to be too many a second
                call = await attacker.connect()
                await asyncio.sleep(0.005)  # so that the node is told of it
                call.cancel()
                if table.get(NODE.node_id) is not held:
                    break

        await asyncio.gather(*map(flood, ADDRESSES[1:4]))
        assert (table.get(NODE.node_id) is held) is is_defended
        assert not is_defended or await relay.reaches(ADDRESSES[9]) == ""


async def test_a_connection_that_makes_room_just_as_it_is_taken_leaves_no_call_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with relaying() as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        asking = await caller.connect(node.identity)
        ticket = await node.tickets.get()
        own, far_end = relay.servicer.table._connections_to[node.identity.node_id], relay_servicer._FarEnd

        def taken_too_late(context: Any) -> Any:
            (connection,) = [each for subnet in own.parties for each in own.of(subnet)]
            connection.end()
            return far_end(context)

        monkeypatch.setattr(relay_servicer, "_FarEnd", taken_too_late)
        taken = await node.accept(ticket)
        assert await code_of(asking) is CODES.UNAVAILABLE
        assert await code_of(taken) is CODES.OK


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: for ever"])
async def test_a_connection_that_nobody_reads_ends_and_holds_few_bytes(is_defended: bool) -> None:
    async with relaying(idle_s=0.5 if is_defended else 1e6, bytes_per_s=2**30) as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        asking = await caller.connect(node.identity)
        taken = await node.accept(await node.tickets.get())

        async def send() -> None:
            try:
                while True:
                    await taken.write(pb.AcceptRequest(data=bytes(FRAME_BYTES)))
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

        sending = asyncio.ensure_future(send())
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not relay.num_connections:
                break
        assert (relay.num_connections == 0) is is_defended
        assert int(relay.servicer.status()["bytes"]) < 2**23, "what the caller had room for"  # type: ignore[arg-type]
        asking.cancel()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


# --- through an honest relay against the node behind it -----------------------------------------------------


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: all are one origin"])
async def test_who_uses_up_the_handshakes_of_a_node_does_so_for_its_own_subnet(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(RelayServicer, "_origin_of", lambda self, subnet: b"all")  # type: ignore[arg-type]
    async with relaying() as relay:
        await relay.node(ServerLimits(handshakes_per_minute=30))
        endpoint = await relay._stack.enter_async_context(forwarding(ADDRESSES[1], relay.address.endpoint))
        attacker = GrpcTransport(Identity.create(), RUN, ExchangeConfig(), SystemClock())
        relay._stack.push_async_callback(attacker.stop)
        through = PeerAddress(node_id=NODE.node_id, endpoint=f"{endpoint}/{RELAY.node_id}")
        client = await attacker.connect(through, 5.0)
        stub: Any = SessionServiceStub(client._channel.channel)  # type: ignore[attr-defined]
        request = session_service_pb2.ChallengeRequest(client_nonce=bytes(32))
        calls = [stub.Challenge(request, timeout=5.0) for _ in range(15)]
        await asyncio.gather(*calls, return_exceptions=True)
        calls = [stub.Challenge(request, timeout=1.0) for _ in range(15)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert (await relay.reaches(ADDRESSES[2], timeout_s=1.5) == "") is is_defended


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: sessions without end"])
async def test_who_asks_for_all_connections_of_a_node_does_not_cost_it_its_reservation(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_client, "CALLS_PER_SESSION", 2)
        monkeypatch.setattr(relay_client, "SESSIONS_PER_RELAY", 100)
    async with relaying() as relay:
        await relay.node()
        limiter, servicer = relay.transport._sessions.connections, relay.servicer

        async def look(count: int) -> None:
            """Waits until the connections were looked at so often."""
            for _ in range(count):
                before = limiter._open
                await until(lambda before=before: limiter._open is not before)  # type: ignore[misc]

        await look(2)  # the one that holds the reservation is the oldest
        attackers = [await relay.caller(source) for source in ADDRESSES[:4]]
        calls = [await attacker.connect() for attacker in attackers for _ in range(12)]
        if is_defended:
            most = RelayLimits().connections_per_node
            await until(lambda: servicer.table.num_connections_to(NODE.node_id) == most and not servicer._asked)
            await look(3)
            assert servicer.status()["reservations"] == 1
        else:
            await until(lambda: servicer.status()["reservations"] == 0)
        for call in calls:
            call.cancel()


# --- dial-back and directory --------------------------------------------------------------------------------


async def dial_back(caller: Caller, port: int) -> pb.DialBackResponse | grpc.StatusCode:
    try:
        return await caller.stub.DialBack(pb.DialBackRequest(port=port), metadata=caller.metadata, timeout=20.0)
    except grpc.aio.AioRpcError as error:
        return error.code()


def everybody_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation, and what the tests of a dial-back need on one machine: loopback is an address like any other."""
    monkeypatch.setattr(relay_servicer, "is_loopback", lambda host: False)  # type: ignore[arg-type]


async def count_dials(calls: list[int]) -> tuple[asyncio.Server, int]:
    def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(1)
        writer.close()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: everybody is elsewhere"])
async def test_nobody_has_a_relay_try_what_listens_on_its_own_machine(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        everybody_is_elsewhere(monkeypatch)
    calls: list[int] = []
    server, port = await count_dials(calls)
    async with relaying() as relay:
        caller = await relay.caller()
        answer = await dial_back(caller, port)
        assert (answer is CODES.UNAVAILABLE) is is_defended and (not calls) is is_defended
    server.close()


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: without bounds"])
async def test_a_subnet_has_few_ports_of_its_own_address_tried_and_none_of_services(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody_is_elsewhere(monkeypatch)
    if not is_defended:
        monkeypatch.setattr(reservation_table, "DIAL_BACKS_BURST", 1e6)
        monkeypatch.setattr(reservation_table, "LEAST_PORT", 1)
    calls: list[int] = []
    server, port = await count_dials(calls)
    async with relaying() as relay:
        for _ in range(3):  # keys are free
            caller = await relay.caller()
            assert (await dial_back(caller, 22) is CODES.RESOURCE_EXHAUSTED) is is_defended
            for _ in range(4):
                answer = await dial_back(caller, port)
                assert isinstance(answer, grpc.StatusCode) or not answer.is_reached
        assert (len(calls) <= reservation_table.DIAL_BACKS_BURST) is is_defended or len(calls) == 12
        assert (len(calls) == 12) is not is_defended
    server.close()


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: for ever"])
async def test_a_dial_back_leads_to_who_proved_its_key_there_and_not_for_ever(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody_is_elsewhere(monkeypatch)
    async with relaying() as relay:
        node = GrpcTransport(NODE, RUN, ExchangeConfig(), SystemClock())
        await node.serve(HoldsNothing())
        port = int(node.endpoint.rpartition(":")[2])
        owner, thief = await relay.caller(identity=NODE), await relay.caller()
        answer = await dial_back(thief, port)
        assert isinstance(answer, pb.DialBackResponse) and not answer.is_reached and "expected node" in answer.detail
        answer = await dial_back(owner, port)
        assert isinstance(answer, pb.DialBackResponse) and answer.is_reached
        assert await relay.reaches(ADDRESSES[1]) == ""
        assert await code_of(await thief.connect(thief.identity)) is CODES.NOT_FOUND
        if is_defended:
            monkeypatch.setattr(reservation_table, "DIALLED_S", 0.0)
        assert ("holds no reservation" in await relay.reaches(ADDRESSES[2])) is is_defended
        await node.stop()


class Records:
    """A directory that counts what it is asked."""

    num_calls = 0

    async def pass_on(self, data: bytes) -> bool:
        self.num_calls += 1
        return True

    async def records(self) -> list[bytes]:
        self.num_calls += 1
        return [secrets.token_bytes(500)] * 600


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: by key alone"])
async def test_free_keys_of_one_subnet_look_up_few_adverts(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_servicer, "RECORD_CALLS_OF_SUBNET", 1 if is_defended else 1000)
    async with relaying() as relay:
        records = relay.transport.directory = Records()
        stopped = False
        for _ in range(6):
            caller = await relay.caller()
            for _ in range(5):
                call = caller.stub.Lookup(pb.LookupRequest(), metadata=caller.metadata, timeout=1.0)
                try:
                    assert sum([len(response.adverts) async for response in call]) == 600
                except grpc.aio.AioRpcError:
                    stopped = True
                    break
            if stopped:
                break
        assert (records.num_calls <= 2 * relay_servicer.RECORD_CALLS_BURST) is is_defended or not stopped
        assert stopped is is_defended


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: each subnet by itself"])
async def test_free_keys_of_many_subnets_announce_little_and_keep_no_holder_of_a_reservation_out(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_PER_S", 1e-9)
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_BURST", 4.0 if is_defended else 1e6)

    async def announce(caller: Caller) -> bool:
        advert = seal_advert(make_advert(caller.identity.node_id, run_id=RUN), caller.identity)
        try:
            await caller.stub.Announce(pb.AnnounceRequest(advert=advert), metadata=caller.metadata, timeout=5.0)
        except grpc.aio.AioRpcError as error:
            assert error.code() is CODES.UNAVAILABLE and "too many announcements" in str(error.details())
            return False
        return True

    async with relaying() as relay:
        records = relay.transport.directory = Records()
        holder = await relay.caller(ADDRESSES[9])
        assert await holder.reserve() is not None
        num_taken = sum([await announce(await relay.caller(source)) for source in ADDRESSES[:8]])
        assert await announce(holder)
        assert (num_taken == 4) is is_defended and records.num_calls == num_taken + 1


async def test_nobody_announces_the_advert_of_another() -> None:
    async with relaying() as relay:
        records = relay.transport.directory = Records()
        caller = await relay.caller()
        for advert in (b"", secrets.token_bytes(300), bytes(2000)):
            call = caller.stub.Announce(pb.AnnounceRequest(advert=advert), metadata=caller.metadata)
            assert await code_of(call) is CODES.RESOURCE_EXHAUSTED
        assert records.num_calls == 0
