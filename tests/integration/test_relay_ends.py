"""Ends of relayed connections that close: what was written before arrives, by sockets and by calls; nothing stays."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attacked_relay import NODE, RUN, Relay, relaying
from waits import PROMPT_S, hold, until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.identity import Identity
from swarm.relay import relay_client
from swarm.relay.relay_client import RelayReservation
from swarm.relay.relaying_transport import RelayedSocket, RelayingTransport

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
