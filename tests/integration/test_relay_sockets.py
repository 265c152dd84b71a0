"""Ends of relayed connections: sockets at the port of the relay, or calls; what was written before an end arrives."""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from waits import PROMPT_S, hold, until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.relay import relay_client, ticket_port
from swarm.relay.relay_client import RelayReservation
from swarm.relay.relaying_transport import RelayedSocket, RelayingTransport
from swarm.relay.ticket_port import GREETING, TicketPort, show_ticket
from swarm.testing.builders import make_identity
from swarm.wire.host_names import dial
from tests.worlds.relay_world import ADDRESSES, CODES, HERE, NODE, RUN, Relay, code_of, relaying


async def ended(connection: socket.socket) -> bool:
    """True once the other side closes the connection."""
    try:
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    except OSError:
        return True


# --- which way bytes go ----------------------------------------------------------------------------------------


class Firewall:
    """Takes connections at a port, and answers none: its queue is full."""

    def __init__(self) -> None:
        self._server = socket.create_server((HERE, 0), backlog=0)
        self.port, self._held = self._server.getsockname()[1], ExitStack()
        for _ in range(2):
            filling = self._held.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex((HERE, self.port))

    def close(self) -> None:
        self._held.close()
        self._server.close()


async def test_where_the_port_is_not_reached_bytes_go_by_the_calls_and_it_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_client, "SOCKET_S", 0.3)
    num_dials = 0

    async def shown(host: str, port: int, ticket: bytes) -> socket.socket:
        nonlocal num_dials
        num_dials += 1
        return await show_ticket(host, port, ticket)

    monkeypatch.setattr(relay_client, "show_ticket", shown)
    async with relaying() as relay:
        firewall = Firewall()
        relay._stack.callback(firewall.close)
        relay.port = firewall.port
        await relay.node()
        for _ in range(3):
            assert await relay.reaches(ADDRESSES[1]) == ""
        assert relay.servicer.status()["reservations"] == 1
        # the node waits once; each of the callers is another one, and has two connections
        assert num_dials == 1 + 3, num_dials


@pytest.mark.parametrize("port", [0, 22, 80, 1023, 65536, 2**31])
async def test_no_port_of_a_known_service_is_dialled_for_a_relay(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def shown(*_: Any) -> None:
        raise AssertionError("it was dialled")

    monkeypatch.setattr(relay_client, "show_ticket", shown)
    address = PeerAddress(node_id=NODE.node_id, endpoint="127.0.0.1:7700")
    transport = RelayingTransport(NODE, "run", ExchangeConfig(), SystemClock())
    assert await transport._relays.socket_to(address, port, bytes(16)) is None
    with pytest.raises(AssertionError):  # it would be, elsewhere
        await transport._relays.socket_to(address, 1024, bytes(16))


# --- who shows no ticket ---------------------------------------------------------------------------------------


async def test_sockets_that_show_nothing_are_few_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_port, "MAX_SILENT", 24)
    monkeypatch.setattr(ticket_port, "MAX_SILENT_OF_SUBNET", 8)
    async with relaying() as relay:
        _, _, asking, ticket = await relay.asked_for()
        port = relay.servicer._port
        with ExitStack() as stack:
            held = [
                stack.enter_context(await dial(HERE, port.number, source))
                for source in ADDRESSES[:5]
                for _ in range(16)
            ]
            stack.enter_context(await show_ticket(HERE, port.number, ticket))  # which is accepted after the others
            assert (await asking.read()).port == port.number
            assert len(port._silent) <= 24
            closed = [asyncio.ensure_future(ended(each)) for each in held]
            await until(lambda: sum(each.done() for each in closed) >= len(held) - 24)
            for task in closed:
                task.cancel()
            await asyncio.gather(*closed, return_exceptions=True)
        await until(lambda: not len(port._silent))


async def test_a_socket_that_shows_its_ticket_byte_by_byte_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_port, "TICKET_S", ticket_port.TICKET_S / 20)
    port, loop = TicketPort(), asyncio.get_running_loop()
    await port.start(HERE, 0)
    connection = await dial(HERE, port.number)

    async def trickle() -> None:
        for byte in GREETING:
            await loop.sock_sendall(connection, bytes([byte]))
            await asyncio.sleep(0.1)

    trickling, closing = asyncio.ensure_future(trickle()), asyncio.ensure_future(ended(connection))
    done, _ = await asyncio.wait((closing,), timeout=5.0)
    for task in (trickling, closing):
        task.cancel()
    await asyncio.gather(trickling, closing, return_exceptions=True)
    connection.close()
    await port.close()
    assert done


@pytest.mark.parametrize("shown", [b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n", bytes(64), GREETING + bytes(16)])
async def test_what_is_no_ticket_ends_the_socket_and_nothing_else(shown: bytes) -> None:
    async with relaying() as relay:
        _, _, asking, ticket = await relay.asked_for()
        with await dial(HERE, relay.port) as stranger:
            await asyncio.get_running_loop().sock_sendall(stranger, shown)
            assert await ended(stranger)
        with await show_ticket(HERE, relay.port, ticket):
            assert len((await asking.read()).ticket) == 16


async def test_a_ticket_is_good_once_whichever_way_it_is_shown() -> None:
    async with relaying() as relay:
        node, _, asking, ticket = await relay.asked_for()
        with await show_ticket(HERE, relay.port, ticket):
            first = await asking.read()
            with pytest.raises(OSError, match=r"connection ended|reset"):
                await show_ticket(HERE, relay.port, ticket)
            assert await code_of(await node.accept(ticket)) is CODES.NOT_FOUND
            with await show_ticket(HERE, first.port, first.ticket):
                with pytest.raises(OSError, match=r"connection ended|reset"):
                    await show_ticket(HERE, first.port, first.ticket)
                assert relay.num_connections == 1
        assert await code_of(asking) is CODES.OK


async def test_tickets_of_a_connection_that_is_over_lead_nowhere() -> None:
    async with relaying() as relay:
        node, caller, asking, ticket = await relay.asked_for()
        asking.cancel()
        await until(lambda: relay.num_connections == 0, most_s=PROMPT_S)
        with pytest.raises(OSError, match=r"connection ended|reset"):
            await show_ticket(HERE, relay.port, ticket)
        asking = await caller.connect(node.identity)
        with await show_ticket(HERE, relay.port, await node.tickets.get()) as far:
            first = await asking.read()
            asking.cancel()
            assert await ended(far)
        with pytest.raises(OSError, match=r"connection ended|reset"):
            await show_ticket(HERE, first.port, first.ticket)
        assert not relay.servicer._port._awaited and not relay.servicer._asked


# --- bounds that hold for sockets as for calls -------------------------------------------------------------------


async def test_bytes_of_sockets_are_of_the_budget() -> None:
    rate = 2**18
    async with relaying(bytes_per_s=rate, burst_bytes=2**17) as relay:
        _, _, asking, ticket = await relay.asked_for()
        loop = asyncio.get_running_loop()
        with await show_ticket(HERE, relay.port, ticket) as far:
            first = await asking.read()
            with await show_ticket(HERE, first.port, first.ticket) as near:

                async def send() -> None:
                    while True:
                        await loop.sock_sendall(far, bytes(2**16))

                sending, num_read, began_s = asyncio.ensure_future(send()), 0, loop.time()
                while num_read < 2**19:
                    num_read += len(await loop.sock_recv(near, 2**16))
                took_s = loop.time() - began_s
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        assert num_read / took_s < 2 * rate


async def test_where_little_passes_each_of_many_hears_of_its_other_end_all_the_time() -> None:
    """Of three connections at the least rate two were given up after six seconds, as all waited for frames."""
    loop, num_connections = asyncio.get_running_loop(), 3
    async with relaying(bytes_per_s=12_500, burst_bytes=4096) as relay:
        node, caller = await relay.caller(), await relay.caller()
        await node.reserve()
        fars, nears = [], []
        for _ in range(num_connections):
            asking = await caller.connect(node.identity)
            fars.append(await show_ticket(HERE, relay.port, await node.tickets.get()))
            first = await asking.read()
            nears.append(await show_ticket(HERE, first.port, first.ticket))

        async def send(far: socket.socket) -> None:
            while True:
                await loop.sock_sendall(far, bytes(2**16))

        async def longest_silence(near: socket.socket) -> float:
            longest_s, before_s = 0.0, loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(4.0):
                    while await loop.sock_recv(near, 2**16):
                        longest_s, before_s = max(longest_s, loop.time() - before_s), loop.time()
            return max(longest_s, loop.time() - before_s)

        sending = [asyncio.ensure_future(send(far)) for far in fars]
        silences = await asyncio.gather(*map(longest_silence, nears))
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        for end in (*fars, *nears):
            end.close()
        assert max(silences) < 2.0, silences


async def test_a_connection_of_sockets_makes_room_and_is_told_why() -> None:
    async with relaying(connections=2) as relay:
        node = await relay.caller()
        await node.reserve()
        ends, asking = list[socket.socket](), []

        async def take(port: int, ticket: bytes) -> None:
            ends.append(await show_ticket(HERE, port, ticket))
            relay._stack.callback(ends[-1].close)

        attacker = await relay.caller(ADDRESSES[1])
        for _ in range(2):
            asking.append(await attacker.connect(node.identity))
            await take(relay.port, await node.tickets.get())
            first = await asking[-1].read()
            await take(first.port, first.ticket)
        honest = await relay.caller(ADDRESSES[2])
        newest = await honest.connect(node.identity)
        await until(lambda: newest.done() or not node.tickets.empty())
        assert not newest.done(), "it has a place"
        await take(relay.port, await node.tickets.get())
        assert len((await newest.read()).ticket) == 16
        assert await code_of(asking[1]) is CODES.UNAVAILABLE and "made room" in await asking[1].details()
        assert await ended(ends[2]) and await ended(ends[3])
        assert relay.num_connections == 2


async def test_why_a_connection_of_sockets_ended_reaches_who_dialled() -> None:
    async with relaying() as relay:
        node = await relay.caller(identity=NODE)
        await node.reserve()
        transport = RelayingTransport(make_identity(9), "relay-floods", ExchangeConfig(), SystemClock())
        through = PeerAddress(node_id=NODE.node_id, endpoint=f"{relay.address.endpoint}/{relay.address.node_id}")
        dialling = asyncio.ensure_future(transport.connect(through, 10.0))
        with await show_ticket(HERE, relay.port, await node.tickets.get()):
            await until(lambda: relay.num_connections == 1)
            own = relay.servicer.table._connections
            (connection,) = [each for subnet in own.parties for each in own.of(subnet)]
            await until(lambda: bool(relay.servicer.status()["bytes"]))
            connection.end()
            with pytest.raises(Unavailable, match="made room for another one"):
                await dialling
        await transport.stop()


# --- where it listens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "127.0.0.1", "localhost", "[::1]"])
async def test_the_port_is_where_the_server_is(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    port, shown = TicketPort(), asyncio.get_running_loop().create_future()
    await port.start(host, 0)
    with port.awaited(bytes(16), shown):
        towards = {"0.0.0.0": HERE, "[::]": HERE}.get(host, host.strip("[]"))
        with await show_ticket(towards, port.number, bytes(16)), await shown as end:
            end.send(b"here")
    with pytest.raises(ConfigError, match=f"relay_port {port.number}: cannot listen .* free the port"):
        await TicketPort().start(host, port.number)
    await port.close()
    assert port.number == 0


async def test_a_relay_without_reservations_has_no_port() -> None:
    async with relaying(reservations=0) as relay:
        assert relay.port == 0


async def test_a_relay_that_is_the_dialler_itself_is_reached_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    async def shown(host: str, port: int, ticket: bytes) -> socket.socket:
        hosts.append(host)
        return await show_ticket(host, port, ticket)

    async with relaying() as relay:
        await relay.node()
        monkeypatch.setattr(relay_client, "show_ticket", shown)
        endpoint = f"relay.invalid:1/{relay.address.node_id}"
        client = await relay.transport.connect(PeerAddress(node_id=NODE.node_id, endpoint=endpoint), 5.0)
        await client.close()
        assert set(hosts) == {HERE} and relay.servicer.status()["sockets"] == 2


# --- ends that close -------------------------------------------------------------------------------------------------


SENT = random.Random(0).randbytes(400_000)
SLOW = {"bytes_per_s": 2**18, "burst_bytes": 2**16}
WAY = ("socket", "call")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def no_socket(*_: Any) -> None:
    """Bytes go by the call."""


@asynccontextmanager
async def connected(relay: Relay, *, near: str, far: str) -> AsyncGenerator[tuple[Streams, Streams, RelayReservation]]:
    """The caller's end and the node's of a relayed connection, each by "socket" or "call"; the node's reservation."""
    transports = [RelayingTransport(each, RUN, ExchangeConfig(), SystemClock()) for each in (Identity.create(), NODE)]
    for transport, way in zip(transports, (near, far), strict=True):
        if way == "call":
            transport._relays.socket_to = no_socket  # type: ignore[method-assign, assignment]
    taken = asyncio.Queue[Streams]()
    server = await asyncio.start_server(lambda *ends: taken.put_nowait(ends), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    reservation = RelayReservation(transports[1]._relays, relay.address, f"{host}:{port}")
    holding = await hold(reservation)
    writers: list[asyncio.StreamWriter] = []
    try:
        async with RelayedSocket(transports[0]._relays, relay.address, NODE.node_id, 6.0) as path:
            own = await asyncio.open_unix_connection(path)
            writers.append(own[1])
            other = await taken.get()
            writers.append(other[1])
            yield own, other, reservation
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        for writer in writers:
            writer.close()
        server.close()
        for transport in transports:
            await transport.stop()


@pytest.mark.parametrize("sender", ["caller", "node"])
@pytest.mark.parametrize("far", WAY)
@pytest.mark.parametrize("near", WAY)
async def test_what_was_written_before_an_end_closed_arrives(near: str, far: str, sender: str) -> None:
    async with relaying(**SLOW) as relay, connected(relay, near=near, far=far) as (*ends, _):
        (_, near_writer), (far_reader, _) = ends
        near_writer.write(b"x")  # as a client of TLS: it begins
        await far_reader.readexactly(1)
        (reader, _), (_, writer) = ends if sender == "node" else reversed(ends)
        writer.write(SENT)
        writer.close()
        received = await reader.read(-1)
        assert received == SENT, len(received)
        await until(lambda: not relay.num_connections, most_s=PROMPT_S)


@pytest.mark.parametrize("far", WAY)
async def test_a_relay_that_reads_nothing_keeps_no_connection_of_a_node_that_ended_it(
    far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_client, "IDLE_S", 1.0)
    async with relaying(idle_s=1e6) as relay, connected(relay, near="socket", far=far) as (near, other, reservation):
        near[1].write(b"x")
        await other[0].readexactly(1)
        other[1].write(bytes(2**24))
        await asyncio.sleep(0.5)  # all buffers are full
        other[1].transport.abort()
        await asyncio.sleep(1.5)
        assert len(reservation._tasks) == 0
