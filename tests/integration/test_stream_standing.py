"""Streams from as many subnets as there are places, over real sockets: a peer that is known always gets one.

Each attacker subnet is one address of 127/8, from which a forwarder connects; the honest node is at 127.0.0.1.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import Unavailable
from swarm.exchange import exchange_servicer
from swarm.exchange.grpc_transport import GrpcTransport, PeerHooks
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, PeerClient, StreamItem
from swarm.peers.peer_table import Peers
from swarm.testing.builders import HoldsNothing, make_identity
from swarm.types import Cursor, NodeId, StreamFilter
from tests.attacks.call_flood import forwarding
from tests.attacks.connection_flood import loopback_addresses

RUN = "stream-standing"
NUM_PLACES = 8
SERVER, HONEST = make_identity(1), make_identity(2)


class Quiet(HoldsNothing):
    """A handler that opens a stream and sends nothing on it."""

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        yield StreamItem(cursor=Cursor(epoch="e", sequence=1), digest=bytes(32), size_bytes=1, sealed=None)
        await asyncio.Event().wait()


def transport_of(identity: Identity) -> GrpcTransport:
    return GrpcTransport(identity, RUN, ExchangeConfig(), SystemClock())


async def has_stream(client: PeerClient) -> AsyncIterator[StreamItem] | None:
    """An open stream; None where there is no place for it."""
    stream = client.subscribe(Cursor(), StreamFilter())
    try:
        await anext(stream)
    except Unavailable:
        return None
    return stream


async def test_streams_from_as_many_subnets_as_places_keep_no_known_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_servicer, "STREAMS_TOTAL", NUM_PLACES)
    monkeypatch.setattr(exchange_servicer, "STREAMS_OF_NEWCOMERS", NUM_PLACES // 4)
    peers = Peers(SERVER.node_id)
    server = GrpcTransport(
        SERVER,
        RUN,
        ExchangeConfig(),
        SystemClock(),
        hooks=PeerHooks(standing=lambda peer: int(peer == HONEST.node_id), note_call=peers.record_call),
    )
    (endpoint,) = await server.serve(Quiet())
    sources, held = loopback_addresses(NUM_PLACES), list[AsyncIterator[StreamItem]]()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        for number, source in enumerate(sources):
            through = await stack.enter_async_context(forwarding(source, endpoint))
            hostile = transport_of(make_identity(10 + number))
            stack.push_async_callback(hostile.stop)
            stream = await has_stream(await hostile.connect(PeerAddress(node_id=SERVER.node_id, endpoint=through), 5.0))
            assert stream is not None
            held.append(stream)
        assert set(peers.inbound.values()) == set(sources), "where each calls from is known"
        honest = transport_of(HONEST)
        stack.push_async_callback(honest.stop)
        client = await honest.connect(PeerAddress(node_id=SERVER.node_id, endpoint=endpoint), 5.0)
        got = await has_stream(client)
        for stream in (*held, *filter(None, [got])):
            await stream.aclose()  # type: ignore[attr-defined]
    assert got is not None
