"""Resources that hostile callers, nodes and strangers tie up at a relay: places, memory, files, tickets, turns."""

import asyncio
import errno
import resource
import secrets
import socket
from contextlib import ExitStack
from typing import Any

import pytest
from waits import PROMPT_S, until

from swarm.errors import SwarmError
from swarm.relay import relay_servicer, tunnel
from swarm.relay.ticket_port import TICKET_BYTES, TicketPort, show_ticket
from swarm.relay.tunnel import FRAME_BYTES, SOCKET_BYTES
from swarm.wire import session
from swarm.wire.server import Sessions
from swarm.wire.v1 import relay_service_pb2 as pb
from tests.worlds.relay_world import ADDRESSES, CODES, HERE, Caller, Relay, code_of, relaying

# --- what a relay holds ---------------------------------------------------------------------------------------


async def narrow(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Somebody whose calls have room for less than a message."""
    usual = session._channel_options(20.0, is_prompt=False)
    own = {"grpc.http2.lookahead_bytes": 5, "grpc.http2.bdp_probe": 0}
    options = [each for each in usual if each[0] not in own] + [*own.items()]
    with monkeypatch.context() as patched:
        patched.setattr(session, "_channel_options", lambda ping_s, is_prompt: options)
        return await relay.caller(ADDRESSES[1])


async def test_who_has_no_room_for_the_first_answer_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with relaying(idle_s=0.5) as relay:
        node = await relay.caller()
        await node.reserve()
        attacker = await narrow(relay, monkeypatch)
        held = [await attacker.connect(node.identity) for _ in range(4)]
        taken = [await node.accept(await node.tickets.get()) for _ in held]
        await asyncio.sleep(1.5)
        assert relay.num_connections == 0
        assert len(taken) == 4


def no_file_is_free(*_: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_without_a_free_file_calls_are_refused_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with relaying() as relay:
        node, _, asking, ticket = await relay.asked_for()
        monkeypatch.setattr(socket, "socketpair", no_file_is_free)
        assert await code_of(await node.accept(ticket)) is CODES.UNAVAILABLE
        monkeypatch.undo()
        asking.cancel()
        await until(lambda: not relay.num_connections, most_s=PROMPT_S)


async def test_a_relay_has_fewer_connections_where_few_files_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))  # type: ignore[misc]
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # that of this process stays
    async with relaying() as relay:
        assert 4 * relay.servicer.table.limits.connections < 128


async def test_one_frame_waits_for_who_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[Any] = []
    plain = tunnel._Side.__init__

    def note(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        sides.append(self)

    monkeypatch.setattr(tunnel._Side, "__init__", note)
    near, own = socket.socketpair()
    far, other = socket.socketpair()
    splicing = asyncio.ensure_future(tunnel.splice(own, other, frame=lambda data: data))
    near.setblocking(False)
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(near, bytes(2**22)))
    await asyncio.sleep(0.3)
    waiting = sides[1]._transport.get_write_buffer_size()
    for task in (sending, splicing):
        task.cancel()
    await asyncio.gather(sending, splicing, return_exceptions=True)
    near.close()
    far.close()
    assert 0 < waiting <= FRAME_BYTES, waiting


async def test_a_node_that_reads_nothing_of_its_call_keeps_none_when_the_caller_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[None] = []
    plain = relay_servicer._bridge

    async def bridge(*arguments: Any) -> None:
        running.append(None)
        try:
            await plain(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(relay_servicer, "_bridge", bridge)
    async with relaying() as relay:
        caller = await relay.caller()
        node = await narrow(relay, monkeypatch)
        await node.reserve()
        asking = await caller.connect(node.identity)
        taken = await node.accept(await node.tickets.get())
        await asking.write(pb.ConnectRequest(data=bytes(FRAME_BYTES)))
        await until(lambda: len(running) == 2)
        asking.cancel()
        await until(lambda: not relay.num_connections, most_s=PROMPT_S)
        await asyncio.sleep(0.2)
        assert len(running) == 0
        taken.cancel()


async def test_the_kernel_keeps_less_of_each_of_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2 * SOCKET_BYTES
    monkeypatch.setattr(relay_servicer, "SOCKETS_BYTES", most)
    ends: list[socket.socket] = []
    plain = relay_servicer.splice

    async def splice(near: socket.socket, far: socket.socket, *until: Any, **options: Any) -> None:
        ends.extend((near, far))
        await plain(near, far, *until, **options)

    monkeypatch.setattr(relay_servicer, "splice", splice)
    async with relaying() as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        calls: list[Any] = []  # else they end
        for number in range(1, 13):
            caller = caller if number % 6 else await relay.caller()
            calls.append(await caller.connect(node.identity))
            ticket, port = await node.tickets.get(), relay.port
            relay._stack.enter_context(await show_ticket(HERE, port, ticket))
            taken = await calls[-1].read()
            relay._stack.enter_context(await show_ticket(HERE, port, taken.ticket))
            await until(lambda number=number: len(ends) == 2 * number)  # type: ignore[misc]
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            for ends_of in (ends[::2], ends[1::2]):
                kept = sum(end.getsockopt(socket.SOL_SOCKET, option) for end in ends_of)
                assert kept <= 2 * 4 * most  # of which the kernel takes half


async def test_tickets_shown_on_sockets_stand_for_none_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    plain = Sessions.refused

    def note(self: Sessions, peer: str, error: SwarmError, num: int = 1) -> SwarmError:
        refused.append(peer)
        return plain(self, peer, error, num)

    monkeypatch.setattr(Sessions, "refused", note)
    async with relaying() as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        for _ in range(3):
            asking = await caller.connect(node.identity)
            with await show_ticket(HERE, relay.port, await node.tickets.get()):
                await asking.read()
            asking.cancel()
        await until(lambda: not relay.num_connections, most_s=PROMPT_S)
        for _ in range(3):
            assert await code_of(await node.accept(secrets.token_bytes(TICKET_BYTES))) is CODES.NOT_FOUND
        assert len(refused) == 3


# --- who only connects ------------------------------------------------------------------------------------------


async def test_who_connects_on_and_on_keeps_nobody_from_the_port_of_a_busy_relay() -> None:
    """800 connections a second, which send nothing, had one dial of four wait for 3.1 s where a turn takes 5 ms."""
    port, num_turns = TicketPort(), 0
    await port.start(HERE, 0)
    with ExitStack() as held:
        for _ in range(30):
            held.enter_context(socket.create_connection((HERE, port.number)))
        while len(port._silent) < 30:
            num_turns += 1
            await asyncio.sleep(0)
    await port.close()
    assert num_turns < 10
