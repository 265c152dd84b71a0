"""Floods of connections on real sockets: newcomers and known peers get a session while the flood is held.

Each attacker subnet is one address of 127/8; honest peers come from 127.0.0.1.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from waits import PROMPT_S, until

from swarm.clock import SystemClock
from swarm.errors import SwarmError, Unavailable
from swarm.identity import Identity
from swarm.telemetry.page_server import CONNECTIONS_PER_SUBNET, MAX_CONNECTIONS, Page, PageServer
from swarm.wire import server as wire_server
from swarm.wire.connection_limits import ConnectionBounds
from swarm.wire.server import ServerLimits, Sessions, start_server
from swarm.wire.session import open_channel
from swarm.wire.v1.session_service_pb2 import ChallengeRequest
from tests.attacks.call_flood import RawConnection, Tally
from tests.attacks.connection_flood import (
    HALF_CLIENT_HELLO,
    ConnectionFlood,
    allow_open_files,
    loopback_addresses,
)

RUN = "test-run"
# A twentieth of the bounds of a real server.
SMALL = ServerLimits(
    connections=256,
    bounds=ConnectionBounds(
        unproven_per_address=8, unproven_per_subnet=16, unproven_of_strangers=40, unproven_of_known=12, unproven_s=60.0
    ),
    handshake_timeout_s=60.0,
)


@dataclass
class Server:
    sessions: Sessions
    endpoint: str

    async def join(self, timeout_s: float = 5.0) -> None:
        """One honest peer joins and leaves. Raises Unavailable."""
        channel = await open_channel(self.endpoint, self.sessions.identity.node_id, Identity.create(), RUN, timeout_s)
        await channel.close()

    async def keep_joining(self, num_tries: int) -> bool:
        """True where one of that many tries got a session."""
        for _ in range(num_tries):
            try:
                await self.join(2.0)
            except SwarmError:
                await asyncio.sleep(0.1)
            else:
                return True
        return False


@asynccontextmanager
async def serving(limits: ServerLimits) -> AsyncGenerator[Server]:
    sessions = Sessions(Identity.create(), RUN, SystemClock(), limits)
    server, port = await start_server("127.0.0.1:0", sessions, [])
    try:
        yield Server(sessions, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("num_sources", "greeting", "use_tls"),
    [(1, b"", False), (300, b"", False), (10, HALF_CLIENT_HELLO, False), (10, b"", True)],
    ids=["idle, one address", "idle, 300 addresses", "half-open TLS", "idle TLS"],
)
async def test_strangers_and_known_peers_join_while_a_flood_is_held(
    num_sources: int, greeting: bytes, use_tls: bool
) -> None:
    for is_known in (False, True):
        async with serving(SMALL) as server:
            if is_known:
                await server.join()
            sources = loopback_addresses(num_sources)
            with ConnectionFlood(server.endpoint, sources, 300, greeting, use_tls, reopened_per_s=200.0) as flood:
                await asyncio.to_thread(flood.until_all_were_opened)
                assert await server.keep_joining(10)
                assert flood.num_held > 0


async def test_5000_idle_connections_of_50_addresses_keep_nobody_out() -> None:
    allow_open_files(16_000)
    async with serving(ServerLimits()) as server:
        with ConnectionFlood(server.endpoint, loopback_addresses(50), 5000) as flood:
            await asyncio.to_thread(flood.until_all_were_opened)
            assert await server.keep_joining(10)
            assert flood.num_opened >= 5000


async def test_where_few_files_may_be_open_a_flood_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_server, "allow_descriptors", lambda _: 64)
    limits = ServerLimits(bounds=ConnectionBounds(unproven_s=60.0), handshake_timeout_s=60.0)
    async with serving(limits) as server:
        with ConnectionFlood(server.endpoint, loopback_addresses(300), 300, reopened_per_s=200.0) as flood:
            await asyncio.to_thread(flood.until_all_were_opened)
            assert await server.keep_joining(10)


async def test_a_connection_that_proved_an_identity_outlives_a_flood_and_goes_on_answering() -> None:
    async with serving(SMALL) as server:
        channel = await open_channel(server.endpoint, server.sessions.identity.node_id, Identity.create(), RUN, 5.0)
        (peer,) = [session.peer for session in server.sessions._sessions.values()]
        with ConnectionFlood(server.endpoint, loopback_addresses(20), 300, reopened_per_s=200.0) as flood:
            await asyncio.to_thread(flood.until_all_were_opened)
            assert await server.keep_joining(10)
            assert server.sessions.connections.is_open(peer)
        await channel.close()


async def test_a_connection_that_proves_nothing_in_time_is_cut() -> None:
    limits = ServerLimits(bounds=ConnectionBounds(unproven_s=0.2))
    async with serving(limits) as server:
        channel = await open_channel(server.endpoint, server.sessions.identity.node_id, Identity.create(), RUN, 5.0)
        (peer,) = [session.peer for session in server.sessions._sessions.values()]
        with ConnectionFlood(server.endpoint, ["127.0.0.1"], 1, use_tls=True) as flood:
            await asyncio.to_thread(flood.until_all_were_opened)
            await until(lambda: flood.num_cut > 0, "the cut", most_s=0.9 * limits.handshake_timeout_s)  # not gRPC's
        assert server.sessions.connections.is_open(peer)  # what proved itself stays
        await channel.close()


# --- HTTP ------------------------------------------------------------------------------------------------


async def get_healthz(port: int) -> bytes:
    """The answer that a monitor gets; nothing when it is cut off or not answered."""
    try:
        async with asyncio.timeout(PROMPT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
                return await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()
    except (TimeoutError, OSError):
        return b""


def healthz(path: str) -> Page | None:
    return Page(body=b"ok\n") if path == "/healthz" else None


@pytest.mark.parametrize("num_sources", [1, 500], ids=["one address", "500 addresses"])
async def test_healthz_answers_while_1000_connections_send_half_a_request(num_sources: int) -> None:
    server = PageServer(healthz)
    port = server.start("127.0.0.1", 0)
    sources = loopback_addresses(num_sources)
    greeting = b"GET /healthz HTTP/1.1\r\nX: "
    try:
        with ConnectionFlood(f"127.0.0.1:{port}", sources, 1000, greeting, reopened_per_s=500.0) as flood:
            await asyncio.to_thread(flood.until_all_were_opened)
            least = MAX_CONNECTIONS if num_sources > 1 else CONNECTIONS_PER_SUBNET
            while server.num_open < least:  # noqa: ASYNC110 - a thread accepts them
                await asyncio.sleep(0.01)
            answers = [await get_healthz(port) for _ in range(5)]
    finally:
        await asyncio.to_thread(server.stop)
    assert all(answer.endswith(b"ok\n") for answer in answers)


async def test_a_connection_that_calls_on_and_on_after_refusals_is_cut() -> None:
    async with serving(ServerLimits()) as server:
        sessions = server.sessions
        channel = await open_channel(server.endpoint, sessions.identity.node_id, Identity.create(), RUN, 5.0)
        (peer,) = [session.peer for session in sessions._sessions.values()]
        await until(lambda: sessions.connections.is_open(peer), "the first look of a thread")
        for _ in range(100):
            sessions.refused(peer, Unavailable("no"))
        await until(
            lambda: not sessions.connections.is_open(peer), "the cut", most_s=20.0
        )  # two looks of half a second
        await channel.close()


@pytest.mark.sweep
async def test_calls_of_no_method_get_few_answers_and_an_end() -> None:
    async with serving(ServerLimits()) as server:
        tally = Tally()
        async with await RawConnection.open(server.endpoint, "127.0.0.1", tally) as connection:
            calling = asyncio.ensure_future(connection.call_on("/swarm.Nobody/Nothing", ChallengeRequest()))
            await until(lambda: calling.done() or tally.num_refused >= 200, "200 answers, or an end")
            assert calling.done() and tally.num_refused < 50
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
