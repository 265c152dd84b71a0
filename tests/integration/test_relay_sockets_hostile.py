"""What callers and nodes, and who only connects to its port, have a relay hold: places, memory, files, tickets, turns.

A mutation that takes a defence out turns its claim red.
"""

import asyncio
import errno
import resource
import secrets
import socket
from contextlib import ExitStack
from typing import Any

import pytest
from attacked_relay import ADDRESSES, CODES, HERE, Caller, Relay, code_of, relaying
from waits import PROMPT_S, until

from swarm.errors import SwarmError
from swarm.relay import acceptor, relay_servicer, tunnel
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.reservation_table import HeldReservation
from swarm.relay.ticket_port import TICKET_BYTES, TicketPort, show_ticket
from swarm.relay.tunnel import FRAME_BYTES, SOCKET_BYTES
from swarm.wire import session
from swarm.wire.server import Sessions
from swarm.wire.v1 import relay_service_pb2 as pb

# --- what a relay holds ---------------------------------------------------------------------------------------


async def narrow(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Somebody whose calls have room for less than a message."""
    usual = session._channel_options(20.0, is_prompt=False)
    own = {"grpc.http2.lookahead_bytes": 5, "grpc.http2.bdp_probe": 0}
    options = [each for each in usual if each[0] not in own] + [*own.items()]
    with monkeypatch.context() as patched:
        patched.setattr(session, "_channel_options", lambda ping_s, is_prompt: options)
        return await relay.caller(ADDRESSES[1])


async def without_an_end(self: Any, context: Any, taken: Any, *ways: asyncio.Future[Any]) -> None:
    """Mutation: who reads nothing of its call has all the time."""
    await context.write(taken)
    await asyncio.wait(ways, timeout=self.limits.idle_s, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: without an end"])
async def test_who_has_no_room_for_the_first_answer_holds_no_place(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(RelayServicer, "_offer", without_an_end)
    async with relaying(idle_s=0.5) as relay:
        node = await relay.caller()
        await node.reserve()
        attacker = await narrow(relay, monkeypatch)
        held = [await attacker.connect(node.identity) for _ in range(4)]
        taken = [await node.accept(await node.tickets.get()) for _ in held]
        await asyncio.sleep(1.5)
        assert relay.num_connections == (0 if is_defended else 4)
        assert len(taken) == 4


def no_file_is_free(*_: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: as the system says"])
async def test_without_a_free_file_calls_are_refused_and_nothing_stays(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relaying() as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        asking = await caller.connect(node.identity)
        ticket = await node.tickets.get()
        if is_defended:
            monkeypatch.setattr(socket, "socketpair", no_file_is_free)
        else:
            monkeypatch.setattr(relay_servicer, "local_pair", no_file_is_free)
        assert await code_of(await node.accept(ticket)) is (CODES.UNAVAILABLE if is_defended else CODES.UNKNOWN)
        monkeypatch.undo()
        asking.cancel()
        await until(lambda: not relay.num_connections, most_s=PROMPT_S)


def of_all_files(most: int) -> int:
    """Mutation: connections take files as long as there are some."""
    return most


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: of all files"])
async def test_a_relay_has_fewer_connections_where_few_files_are_allowed(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))  # type: ignore[misc]
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # that of this process stays
    if not is_defended:
        monkeypatch.setattr(relay_servicer, "places_for_relayed", of_all_files)
    async with relaying() as relay:
        assert (4 * relay.servicer.table.limits.connections < 128) is is_defended


def as_asyncio_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: asyncio keeps 64 KiB before it says that there is no room."""
    plain = tunnel._Side.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        plain(self, transport)
        transport.set_write_buffer_limits()

    monkeypatch.setattr(tunnel._Side, "connection_made", connection_made)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: as asyncio does"])
async def test_one_frame_waits_for_who_reads_nothing(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_defended:
        as_asyncio_does(monkeypatch)
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
    assert (0 < waiting <= FRAME_BYTES) is is_defended, waiting
    for task in (sending, splicing):
        task.cancel()
    await asyncio.gather(sending, splicing, return_exceptions=True)
    near.close()
    far.close()


async def never(_: asyncio.Event) -> None:
    """Mutation: a call that took a connection ends by itself."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: never"])
async def test_a_node_that_reads_nothing_of_its_call_keeps_none_when_the_caller_left(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(relay_servicer, "_until_set", never)
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
        assert len(running) == (0 if is_defended else 1)
        taken.cancel()


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: as much for each"])
async def test_the_kernel_keeps_less_of_each_of_many_connections(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2 * SOCKET_BYTES
    monkeypatch.setattr(relay_servicer, "SOCKETS_BYTES", most if is_defended else 2**40)
    ends: list[socket.socket] = []
    plain = relay_servicer.splice

    async def splice(near: socket.socket, far: socket.socket, *until: Any, **options: Any) -> None:
        ends.extend((near, far))
        await plain(near, far, *until, **options)

    monkeypatch.setattr(relay_servicer, "splice", splice)
    async with relaying() as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        held: list[Any] = []
        for number in range(1, 13):
            caller = caller if number % 6 else await relay.caller()
            held.append(await caller.connect(node.identity))
            ticket, port = await node.tickets.get(), relay.servicer._port.number
            held.append(await show_ticket(HERE, port, ticket))
            taken = await held[-2].read()
            held.append(await show_ticket(HERE, port, taken.ticket))
            await until(lambda number=number: len(ends) == 2 * number)  # type: ignore[misc]
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            for ends_of in (ends[::2], ends[1::2]):
                kept = sum(end.getsockopt(socket.SOL_SOCKET, option) for end in ends_of)
                assert (kept <= 2 * 4 * most) is is_defended  # of which the kernel takes half
        for each in held:
            if isinstance(each, socket.socket):
                each.close()


def unless_it_is_none(self: HeldReservation) -> bool:
    """Mutation: a ticket that is shown on a socket is still to be shown."""
    return self.num_tickets > 0


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: unless it is none"])
async def test_tickets_shown_on_sockets_stand_for_none_that_are_none(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(HeldReservation, "count_shown", unless_it_is_none)
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
            with await show_ticket(HERE, relay.servicer._port.number, await node.tickets.get()):
                await asking.read()
            asking.cancel()
        await until(lambda: not relay.num_connections, most_s=PROMPT_S)
        for _ in range(3):
            assert await code_of(await node.accept(secrets.token_bytes(TICKET_BYTES))) is CODES.NOT_FOUND
        assert len(refused) == (3 if is_defended else 0)


# --- who only connects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: one in a turn"])
async def test_who_connects_on_and_on_keeps_nobody_from_the_port_of_a_busy_relay(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 connections a second, which send nothing, had one dial of four wait for 3.1 s where a turn takes 5 ms."""
    if not is_defended:
        monkeypatch.setattr(acceptor, "_IN_A_TURN", 1)
    port, num_turns = TicketPort(), 0
    await port.start(HERE, 0)
    with ExitStack() as held:
        for _ in range(30):
            held.enter_context(socket.create_connection((HERE, port.number)))
        while len(port._silent) < 30:
            num_turns += 1
            await asyncio.sleep(0)
        assert (num_turns < 10) is is_defended
    await port.close()
