"""Callers that flood a relay, and through it a node: places, tickets, handshakes, calls that are none."""

import asyncio
import secrets
import socket
from contextlib import suppress
from typing import Any

import grpc
import pytest
from waits import until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.relay import relay_servicer
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.relay.tunnel import FRAME_BYTES
from swarm.wire import server as wire_server
from swarm.wire.server import ServerLimits
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1 import session_service_pb2
from swarm.wire.v1.session_service_pb2_grpc import SessionServiceStub
from tests.attacks.call_flood import forwarding
from tests.worlds.relay_world import ADDRESSES, CODES, NODE, RELAY, RUN, code_of, relaying

# --- bounds that others fill --------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["connections", "connections_per_node"])
async def test_free_keys_of_a_few_subnets_keep_nobody_else_from_a_node(bound: str) -> None:
    async with relaying(**{bound: 12}) as relay:
        node = await relay.caller()
        await node.reserve()
        attackers = [await relay.caller(source) for source in ADDRESSES[:3] for _ in range(2)]
        held = [await attacker.connect(node.identity) for attacker in attackers for _ in range(2)]
        taken = [await node.accept(await node.tickets.get()) for _ in held]
        await until(lambda: relay.num_connections == 12)
        honest = await relay.caller(ADDRESSES[9])
        asking = await honest.connect(node.identity)
        await until(lambda: asking.done() or not node.tickets.empty())
        assert not asking.done(), "it has a place"
        far = await node.accept(await node.tickets.get())
        await asking.write(pb.ConnectRequest(data=b"hello"))
        assert (await far.read()).data == b"hello"
        assert relay.num_connections == 12 and len(taken) == 12
        ended = [call for call in held if call.done()]
        assert len(ended) <= 1


async def test_free_keys_of_one_subnet_take_few_reservations_and_make_room() -> None:
    async with relaying(reservations=6, reservations_per_subnet=4) as relay:
        for source, num_reservations in ((ADDRESSES[0], 4), (ADDRESSES[1], 2)):
            for _ in range(num_reservations):
                await (await relay.caller(source)).reserve()
        assert await (await relay.caller(ADDRESSES[0])).reserve() is None, "its subnet has enough"
        newcomer = await relay.caller(ADDRESSES[2])
        assert await newcomer.reserve() is not None
        assert relay.servicer.status()["reservations"] == 6


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


async def test_connections_asked_for_without_end_cost_a_node_few() -> None:
    async with relaying(asks_per_s=1.0, asks_burst=16.0) as relay:
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
        assert node.tickets.qsize() <= 20


async def test_who_asks_for_nodes_that_are_not_here_is_counted_as_well() -> None:
    async with relaying(asks_per_s=0.1, asks_burst=16.0) as relay:
        attacker = await relay.caller(ADDRESSES[1])
        codes = [await code_of(await attacker.connect(Identity.create())) for _ in range(19)]
        assert codes[:16] == 16 * [CODES.NOT_FOUND]
        assert CODES.UNAVAILABLE in codes


async def test_callers_of_a_few_subnets_do_not_make_a_relay_look_as_if_it_flooded() -> None:
    async with relaying() as relay:
        await relay.node()
        table = relay.servicer.table
        held = table.get(NODE.node_id)

        async def flood(source: str) -> None:
            attacker = await relay.caller(source)
            for _ in range(220):
                with suppress(grpc.RpcError):  # a relay may refuse who floods it; who is held is the claim
                    call = await attacker.connect()
                    await asyncio.sleep(0.005)  # so that the node gets a ticket
                    call.cancel()
                if table.get(NODE.node_id) is not held:
                    break

        await asyncio.gather(*map(flood, ADDRESSES[1:4]))
        assert table.get(NODE.node_id) is held
        assert await relay.reaches(ADDRESSES[9]) == ""


async def test_a_connection_that_makes_room_just_as_it_is_taken_leaves_no_call_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with relaying() as relay:
        node, _, asking, ticket = await relay.asked_for()
        own, pair = relay.servicer.table._connections_to[node.identity.node_id], socket.socketpair

        def taken_too_late() -> Any:
            (connection,) = [each for subnet in own.parties for each in own.of(subnet)]
            connection.end()
            return pair()

        monkeypatch.setattr(socket, "socketpair", taken_too_late)
        taken = await node.accept(ticket)
        assert await code_of(asking) is CODES.UNAVAILABLE
        assert await code_of(taken) is CODES.OK


async def test_a_connection_that_nobody_reads_ends_and_holds_few_bytes() -> None:
    async with relaying(idle_s=0.5, bytes_per_s=2**30) as relay:
        node, _, asking, ticket = await relay.asked_for()
        taken = await node.accept(ticket)

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
        assert relay.num_connections == 0
        assert int(relay.servicer.status()["bytes"]) < 2**23, "what the caller had room for"  # type: ignore[arg-type]
        asking.cancel()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


# --- through an honest relay against the node behind it -----------------------------------------------------


async def test_who_uses_up_the_handshakes_of_a_node_does_so_for_its_own_subnet() -> None:
    async with relaying() as relay:
        await relay.node(ServerLimits(handshakes_per_minute=30))
        endpoint = await relay._stack.enter_async_context(forwarding(ADDRESSES[1], relay.address.endpoint))
        attacker = RelayingTransport(Identity.create(), RUN, ExchangeConfig(), SystemClock())
        relay._stack.push_async_callback(attacker.stop)
        through = PeerAddress(node_id=NODE.node_id, endpoint=f"{endpoint}/{RELAY.node_id}")
        client = await attacker.connect(through, 5.0)
        stub: Any = SessionServiceStub(client._channel.channel)  # type: ignore[attr-defined]
        request = session_service_pb2.ChallengeRequest(client_nonce=bytes(32))
        calls = [stub.Challenge(request, timeout=5.0) for _ in range(15)]
        await asyncio.gather(*calls, return_exceptions=True)
        calls = [stub.Challenge(request, timeout=1.0) for _ in range(15)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert await relay.reaches(ADDRESSES[2], timeout_s=1.5) == ""


@pytest.mark.parametrize("by", ["sockets", "calls"])
async def test_who_asks_for_all_connections_of_a_node_does_not_cost_it_its_reservation(by: str) -> None:
    async with relaying() as relay:
        if by == "calls":  # of which a session has few
            await relay.servicer.close_port()
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
        most, table = RelayLimits().connections_per_node, servicer.table
        await until(lambda: not len(table) or (table.num_connections_to(NODE.node_id) == most and not servicer._asked))
        await look(3)
        assert len(table) == 1
        for call in calls:
            call.cancel()


# --- tickets and first messages --------------------------------------------------------------------------------------


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
        assert (await near.read()).port == relay.port
        far.cancel()
        assert await code_of(near) is CODES.OK
        assert relay.num_connections == 0


async def test_a_ticket_is_good_once_and_for_its_node_alone() -> None:
    async with relaying() as relay:
        node, thief, caller = [await relay.caller() for _ in range(3)]
        await node.reserve()
        await thief.reserve()
        asking = await caller.connect(node.identity)
        ticket = await node.tickets.get()
        stolen = await thief.accept(ticket)
        await until(lambda: stolen.done() or not relay.servicer._asked)
        assert stolen.done() and await code_of(stolen) is CODES.NOT_FOUND
        assert await code_of(await thief.accept(secrets.token_bytes(16))) is CODES.NOT_FOUND
        taken = await node.accept(ticket)
        await asking.write(pb.ConnectRequest(data=b"hello"))
        assert (await taken.read()).data == b"hello"
        assert await code_of(await node.accept(ticket)) is CODES.NOT_FOUND


@pytest.mark.sweep
async def test_who_shows_tickets_on_and_on_is_cut_and_who_was_told_of_callers_that_left_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

        for _ in range(num_shown):  # one after the other: what is under way at the cut depends on the machine
            await show()
        assert codes.count(CODES.NOT_FOUND) < num_shown // 2
