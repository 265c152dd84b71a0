"""The Transport contract: what any data plane promises, run here over gRPC on loopback.

Another implementation joins by adding a factory to NETWORKS.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from sealed_groups import seal_bytes
from waits import PROMPT_S, hold, until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import NotHeld, TooLarge, Unauthenticated, Unavailable
from swarm.identity import Identity
from swarm.interfaces import ExchangeHandler, PeerAddress, PeerClient, StreamItem, Transport
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, Digest, NodeId, SealedGroup, StreamFilter

MakeTransport = Callable[[Identity], Transport]


@dataclass
class Log(HoldsNothing):
    """A handler over a list: replays what is after the cursor, then follows appends."""

    items: list[SealedGroup] = field(default_factory=list)
    asked: list[tuple[NodeId, Cursor, StreamFilter]] = field(default_factory=list)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    num_open: int = 0
    num_read: int = 0

    async def append(self, sealed: SealedGroup) -> None:
        async with self.grown:
            self.items.append(sealed)
            self.grown.notify_all()

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        self.asked.append((peer, cursor, wanted))
        at = cursor.sequence if cursor.epoch == "one" else 0
        self.num_open += 1
        try:
            while True:
                async with self.grown:
                    while len(self.items) <= at:
                        await self.grown.wait()
                sealed = self.items[at]
                at += 1
                self.num_read += 1
                yield StreamItem(
                    cursor=Cursor(epoch="one", sequence=at),
                    digest=sealed.digest,
                    size_bytes=sealed.size_bytes,
                    sealed=sealed,
                )
        finally:
            self.num_open -= 1

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        for sealed in self.items:
            if sealed.digest == digest:
                return sealed
        raise NotHeld(f"digest {digest.hex()[:8]}")


def _grpc(identity: Identity) -> Transport:
    return RelayingTransport(identity, "test-run", ExchangeConfig(), SystemClock())


class BehindRelay:
    """A transport whose node is reached through a relay alone; all of them share one."""

    def __init__(self, relay: RelayingTransport, relay_id: NodeId, identity: Identity) -> None:
        self._relay, self._relay_id = relay, relay_id
        self._inner = RelayingTransport(identity, "test-run", ExchangeConfig(), SystemClock())
        self._holding: asyncio.Task[None] | None = None

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        await self._inner.serve(handler)
        if not self._relay.endpoint:
            await self._relay.serve(Log())
        reservation = self._inner.reservation_at(PeerAddress(node_id=self._relay_id, endpoint=self._relay.endpoint))
        self._holding = await hold(reservation)
        return (reservation.endpoint,)

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        return await self._inner.connect(address, timeout_s)

    async def stop(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)
            await self._relay.stop()
        await self._inner.stop()


def _relayed() -> MakeTransport:
    identity = Identity.create()
    limits = RelayLimits(bytes_per_s=2**30)
    relay = RelayingTransport(identity, "test-run", ExchangeConfig(), SystemClock(), relay_limits=limits)
    return lambda own: BehindRelay(relay, identity.node_id, own)


NETWORKS: dict[str, Callable[[], MakeTransport]] = {"grpc": lambda: _grpc, "relayed": _relayed}


@pytest.fixture(params=list(NETWORKS))
async def make_transport(request: pytest.FixtureRequest) -> AsyncIterator[MakeTransport]:
    make, made = NETWORKS[request.param](), list[Transport]()

    def tracked(identity: Identity) -> Transport:
        made.append(make(identity))
        return made[-1]

    yield tracked
    await asyncio.gather(*(transport.stop() for transport in made))


@dataclass
class Pair:
    log: Log
    server: Transport
    client: Transport
    address: PeerAddress
    server_identity: Identity
    client_identity: Identity


@pytest.fixture
async def pair(make_transport: MakeTransport) -> Pair:
    ours, theirs, log = Identity.create(), Identity.create(), Log()
    server, client = make_transport(theirs), make_transport(ours)
    (endpoint,) = await server.serve(log)
    return Pair(log, server, client, PeerAddress(node_id=theirs.node_id, endpoint=endpoint), theirs, ours)


async def first(stream: AsyncIterator[StreamItem], count: int) -> list[StreamItem]:
    items: list[StreamItem] = []
    async for item in stream:
        items.append(item)
        if len(items) == count:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return items


async def test_connection_names_the_peer_and_the_handler_sees_the_client(pair: Pair):
    peer = await pair.client.connect(pair.address, 5.0)
    assert peer.node_id == pair.server_identity.node_id
    await pair.log.append(seal_bytes(b"body", pair.server_identity))
    for wanted in (
        StreamFilter(relay=True),
        StreamFilter(wants_zero_variance=True),
        StreamFilter(wants_turn_signal=True),
    ):
        await first(peer.subscribe(Cursor(epoch="e", sequence=7), wanted), 1)
        assert pair.log.asked[-1] == (pair.client_identity.node_id, Cursor(epoch="e", sequence=7), wanted)


async def test_subscription_replays_then_follows_and_resumes_by_cursor(pair: Pair):
    groups = [seal_bytes(bytes([i]) * 100, pair.server_identity) for i in range(6)]
    for sealed in groups[:3]:
        await pair.log.append(sealed)
    peer = await pair.client.connect(pair.address, 5.0)
    stream: Any = peer.subscribe(Cursor(), StreamFilter())
    seen = [await anext(stream) for _ in range(3)]
    late = asyncio.ensure_future(anext(stream))
    await pair.log.append(groups[3])
    seen.append(await late)
    await stream.aclose()
    for sealed in groups[4:]:
        await pair.log.append(sealed)
    seen += await first(peer.subscribe(seen[-1].cursor, StreamFilter()), 2)
    assert [item.sealed for item in seen] == groups
    assert [item.digest for item in seen] == [sealed.digest for sealed in groups]


async def test_large_group_is_noticed_and_fetched_whole(pair: Pair):
    large = seal_bytes(b"0123456789abcdef" * (5 * 2**16 + 1), pair.server_identity)
    await pair.log.append(large)
    peer = await pair.client.connect(pair.address, 5.0)
    (item,) = await first(peer.subscribe(Cursor(), StreamFilter()), 1)
    assert item.digest == large.digest and item.size_bytes == large.size_bytes
    assert item.sealed in (None, large)
    assert await peer.fetch(item.digest, large.size_bytes, 10.0) == large


async def test_fetch_of_what_is_not_held_says_so(pair: Pair):
    peer = await pair.client.connect(pair.address, 5.0)
    with pytest.raises(NotHeld):
        await peer.fetch(bytes(32), 1000, 5.0)


async def test_fetch_above_the_bound_is_refused(pair: Pair):
    large = seal_bytes(bytes(3 * 2**20), pair.server_identity)
    await pair.log.append(large)
    peer = await pair.client.connect(pair.address, 5.0)
    with pytest.raises(TooLarge):
        await peer.fetch(large.digest, 2**20, 5.0)


async def test_other_node_than_expected_is_unauthenticated(pair: Pair):
    wrong = PeerAddress(node_id=Identity.create().node_id, endpoint=pair.address.endpoint)
    at_relay = "/" in pair.address.endpoint  # which knows that nobody of that name holds a reservation
    with pytest.raises(
        Unavailable if at_relay else Unauthenticated, match="holds no reservation" if at_relay else None
    ):
        await pair.client.connect(wrong, 5.0)


async def test_stopped_server_ends_streams_with_unavailable(pair: Pair):
    await pair.log.append(seal_bytes(b"x", pair.server_identity))
    peer = await pair.client.connect(pair.address, 5.0)
    stream: Any = peer.subscribe(Cursor(), StreamFilter())
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await pair.server.stop()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await pair.client.connect(pair.address, 2.0)


async def test_closed_client_ends_its_own_streams_and_the_handlers(pair: Pair):
    await pair.log.append(seal_bytes(b"x", pair.server_identity))
    peer = await pair.client.connect(pair.address, 5.0)
    stream: Any = peer.subscribe(Cursor(), StreamFilter())
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await peer.close()
    with pytest.raises(Unavailable):
        await waiting
    await until(lambda: pair.log.num_open == 0, most_s=PROMPT_S)


async def test_cancelled_reader_is_cancelled_and_frees_the_stream(pair: Pair):
    peer = await pair.client.connect(pair.address, 5.0)
    waiting = asyncio.ensure_future(anext(peer.subscribe(Cursor(), StreamFilter())))
    await until(lambda: pair.log.num_open == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: pair.log.num_open == 0, most_s=PROMPT_S)


async def test_reader_that_stops_reading_stops_the_handler(pair: Pair):
    for index in range(400):
        await pair.log.append(seal_bytes(index.to_bytes(2, "big") * 2**16, pair.server_identity))
    peer = await pair.client.connect(pair.address, 5.0)
    stream: Any = peer.subscribe(Cursor(), StreamFilter())
    await anext(stream)
    read = -1
    while read != pair.log.num_read:
        read = pair.log.num_read
        await asyncio.sleep(0.3)
    assert read < 300  # 400 groups of 128 KiB; buffers of both ends hold the rest
    seen = 1
    async for item in stream:
        seen += 1
        if item.cursor.sequence == 400:
            break
    await stream.aclose()
    assert seen == 400


async def test_many_peers_are_served_at_once(pair: Pair, make_transport: MakeTransport):
    await pair.log.append(seal_bytes(b"x" * 1000, pair.server_identity))

    async def read(transport: Transport) -> NodeId:
        peer = await transport.connect(pair.address, 10.0)
        await first(peer.subscribe(Cursor(), StreamFilter()), 1)
        return peer.node_id

    results: list[Awaitable[NodeId]] = [read(make_transport(Identity.create())) for _ in range(8)]
    assert await asyncio.gather(*results) == [pair.server_identity.node_id] * 8
    assert len({peer for peer, _, _ in pair.log.asked}) == 8
