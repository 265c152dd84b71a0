"""Calls to a relay that are none, and tickets of others: shown again, guessed, stolen."""

import asyncio
import secrets

import grpc
import pytest
from attacked_relay import ADDRESSES, CODES, NODE, RELAY, code_of, relaying
from waits import until

from swarm.relay import relay_servicer
from swarm.wire import server as wire_server
from swarm.wire.v1 import relay_service_pb2 as pb


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
        assert (await near.read()).port == relay.servicer._port.number
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
