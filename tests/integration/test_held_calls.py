"""Calls that keyless connections hold at a node, over real sockets: its neighbours still stream groups.

Each attacker subnet is one address of 127/8; the honest nodes are at 127.0.0.1.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.testing.builders import HoldsNothing, make_identity, make_sealed
from swarm.types import Cursor, NodeId, StreamFilter
from swarm.wire import server as wire_server
from swarm.wire.connection_limits import ConnectionLimiter
from swarm.wire.request_deadline import RequestDeadline
from swarm.wire.server import ServerLimits
from tests.attacks.call_flood import RawConnection
from tests.attacks.connection_flood import loopback_addresses
from tests.worlds.grpc_world import transport_of

NUM_CONNECTIONS = 200
SERVER = make_identity(1)


class Producer(HoldsNothing):
    """Has one group for each neighbour when it subscribes, and another after each `more`."""

    def __init__(self) -> None:
        self.more = asyncio.Event()

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        sealed = make_sealed(identity=SERVER)
        for number in range(2):
            at = Cursor(epoch="e", sequence=1 + number)
            yield StreamItem(cursor=at, digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed)
            await self.more.wait()


async def stream_of(identity: Identity, endpoint: str, stack: AsyncExitStack) -> AsyncIterator[StreamItem] | None:
    """A stream whose first group has come; None where there is no place for it."""
    transport = transport_of(identity)
    try:
        client = await transport.connect(PeerAddress(node_id=SERVER.node_id, endpoint=endpoint), 2.0)
        stream = client.subscribe(Cursor(), StreamFilter())
        stack.push_async_callback(stream.aclose)  # type: ignore[attr-defined]
        assert (await anext(stream)).sealed is not None
    except SwarmError:
        return None
    return stream


async def test_connections_without_a_key_that_hold_all_calls_they_may_keep_no_neighbour_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ServerLimits()
    num_free = limits.concurrent_calls - 1  # one has the stream
    waiting = RequestDeadline(timeout_s=60.0)  # so that the calls stay for as long as this test looks
    monkeypatch.setattr(wire_server, "RequestDeadline", lambda _: waiting)
    monkeypatch.setattr(ConnectionLimiter, "look", lambda self: 0)  # nor is an attacker cut meanwhile
    handler = Producer()
    (endpoint,) = await transport_of(SERVER, limits=limits).serve(handler)
    async with AsyncExitStack() as stack:
        before = await stream_of(make_identity(2), endpoint, stack)
        assert before is not None
        for number, source in enumerate(loopback_addresses(NUM_CONNECTIONS), 1):
            connection = await RawConnection.open(endpoint, source)
            await stack.enter_async_context(connection)
            await connection.begin_calls("/swarm.wire.v1.ExchangeService/Subscribe")
            num_due = min(num_free, number * limits.streams_per_connection)
            while len(waiting._waiting) < num_due:  # noqa: ASYNC110 - of more than 1,000 at once gRPC refuses some
                await asyncio.sleep(0.001)
        during = await stream_of(make_identity(3), endpoint, stack)
        assert during is not None
        handler.more.set()
        for stream in (before, during):
            assert (await anext(stream)).cursor.sequence == 2, "who has a stream goes on"
