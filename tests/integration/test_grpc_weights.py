"""Manifests, credit and chunks between nodes: the contract over both data planes, and hostile peers over gRPC."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from waits import PROMPT_S, until

from swarm.clock import SystemClock
from swarm.errors import Forged, NotHeld, SwarmError, Unavailable
from swarm.exchange import exchange_servicer
from swarm.exchange.exchange_servicer import STREAMS_PER_PEER
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, PeerClient, Transport
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import HoldsNothing
from swarm.types import Credit, Cursor, Digest, NodeId, SealedManifest, StreamFilter
from swarm.weight_sync.weight_server import CHUNKS_PER_PEER, CHUNKS_TOTAL
from swarm.wire.server import Sessions
from swarm.wire.session import CERTIFICATE_NAME, SESSION_KEY, AuthenticatedChannel, fetch_certificate
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc
from swarm.wire.v1 import policy_pb2
from swarm.wire.v1 import session_service_pb2_grpc as session_grpc
from swarm.wire.weights import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, MAX_WINDOW
from tests.worlds.grpc_world import RUN, ServedNode, client_of, serving, status_of, transport_of

LINEAGE = "f" * 64
STALL_S = 0.6

Watched = SealedManifest | Credit
MakeTransport = Callable[[Identity], Transport]


def manifest(number: int, size: int = 100) -> SealedManifest:
    """A manifest that no transport looks into."""
    return SealedManifest(body=number.to_bytes(4, "big") * (size // 4), public_key=bytes(32), signature=bytes(64))


def chunk(number: int, size: int = MAX_CHUNK_BYTES) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def digest_of(data: bytes) -> Digest:
    return hashlib.sha256(data).digest()


@dataclass
class Holder(HoldsNothing):
    """A handler over a list of items of one lineage and a table of chunks."""

    items: list[Watched] = field(default_factory=list)
    chunks: dict[Digest, bytes] = field(default_factory=dict)
    asked: list[tuple[NodeId, str, int]] = field(default_factory=list)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # chunks wait for it
    num_open: int = 0
    num_read: int = 0
    num_asked_chunks: int = 0
    num_serving: int = 0  # calls of chunk under way
    error: SwarmError | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def hold(self, *chunks: bytes) -> list[Digest]:
        self.chunks.update({digest_of(data): data for data in chunks})
        return [digest_of(data) for data in chunks]

    async def append(self, *items: Watched) -> None:
        async with self.grown:
            self.items.extend(items)
            self.grown.notify_all()

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[Watched]:
        self.asked.append((peer, policy_id, window))
        if self.error is not None:
            raise self.error
        if policy_id != LINEAGE:
            raise NotHeld(f"lineage {policy_id[:8]}")
        at, self.num_open = 0, self.num_open + 1
        try:
            while True:
                async with self.grown:
                    while len(self.items) <= at:
                        await self.grown.wait()
                at, self.num_read = at + 1, self.num_read + 1
                yield self.items[at - 1]
        finally:
            self.num_open -= 1

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        self.num_asked_chunks += 1
        self.num_serving += 1
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            if digest not in self.chunks:
                raise NotHeld(f"chunk {digest.hex()[:8]}")
            return self.chunks[digest]
        finally:
            self.num_serving -= 1


def _grpc() -> MakeTransport:
    def make(identity: Identity) -> Transport:
        return transport_of(identity, stall_timeout_s=STALL_S)

    return make


def _memory() -> MakeTransport:
    network = MemoryNetwork(seed=1, faults=FaultPlan())
    return lambda identity: MemoryTransport(network, identity.node_id)


@dataclass
class Pair:
    holder: Holder
    server: Transport
    peer: PeerClient
    client_id: NodeId


@pytest.fixture(params=["grpc", "memory"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    make = {"grpc": _grpc, "memory": _memory}[request.param]()
    ours, theirs, holder = Identity.create(), Identity.create(), Holder()
    server, client = make(theirs), make(ours)
    (endpoint,) = await server.serve(holder)
    peer = await client.connect(PeerAddress(node_id=theirs.node_id, endpoint=endpoint), 5.0)
    yield Pair(holder, server, peer, ours.node_id)
    await asyncio.gather(server.stop(), client.stop())


async def first(stream: AsyncIterator[Watched], count: int) -> list[Watched]:
    async with aclosing(stream):  # type: ignore[type-var]
        return [await anext(stream) for _ in range(count)]


# --- the contract ------------------------------------------------------------------------------


async def test_watch_gives_what_is_held_then_what_is_new_in_order(pair: Pair):
    held: list[Watched] = [manifest(1), manifest(2, 9000), Credit(head_step=2, granted=8)]
    await pair.holder.append(*held)
    stream = pair.peer.watch(LINEAGE, 8)
    seen = [await anext(stream) for _ in held]
    late = asyncio.ensure_future(anext(stream))
    new = Credit(head_step=3, granted=2**40)
    await pair.holder.append(new)
    assert [*seen, await late] == [*held, new]
    assert pair.holder.asked == [(pair.client_id, LINEAGE, 8)]
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: pair.holder.num_open == 0, most_s=PROMPT_S)


async def test_largest_manifest_arrives_whole(pair: Pair):
    await pair.holder.append(manifest(7, MAX_MANIFEST_BYTES))
    assert await first(pair.peer.watch(LINEAGE, 0), 1) == [manifest(7, MAX_MANIFEST_BYTES)]


async def test_watch_of_a_lineage_of_which_nothing_is_held_says_so(pair: Pair):
    with pytest.raises(NotHeld):
        await anext(pair.peer.watch("e" * 64, 0))


async def test_watcher_that_is_not_welcome_is_told_unavailable_not_unauthenticated(pair: Pair):
    pair.holder.error = Unavailable("your reputation is low")
    with pytest.raises(Unavailable) as caught:
        await anext(pair.peer.watch(LINEAGE, 0))
    assert type(caught.value) is Unavailable
    with pytest.raises(Unavailable):
        await pair.peer.fetch_chunk(bytes(32), 5.0)


@pytest.mark.parametrize("ends", ["holder", "client"])
async def test_watch_ends_with_unavailable_when_the_holder_stops_or_the_client_closes(pair: Pair, ends: str):
    await pair.holder.append(manifest(1))
    stream = pair.peer.watch(LINEAGE, 0)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await (pair.server.stop() if ends == "holder" else pair.peer.close())
    with pytest.raises(Unavailable):
        await waiting
    await until(lambda: pair.holder.num_open == 0, most_s=PROMPT_S)


async def test_cancelled_watcher_is_cancelled_and_frees_the_stream(pair: Pair):
    waiting = asyncio.ensure_future(anext(pair.peer.watch(LINEAGE, 0)))
    await until(lambda: pair.holder.num_open == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: pair.holder.num_open == 0, most_s=PROMPT_S)


async def test_watcher_that_stops_reading_stops_the_handler(pair: Pair):
    await pair.holder.append(*(manifest(number, 2**18) for number in range(300)))
    stream = pair.peer.watch(LINEAGE, 0)
    await anext(stream)
    read = -1
    while read != pair.holder.num_read:
        read = pair.holder.num_read
        await asyncio.sleep(0.2)
    assert read < 200  # of 300 manifests of 256 KiB; buffers of both ends hold the rest
    await stream.aclose()  # type: ignore[attr-defined]


async def test_chunks_arrive_whole_one_by_one_and_many_at_once(pair: Pair):
    chunks = [chunk(number) for number in range(CHUNKS_PER_PEER - 1)] + [b"x"]
    digests = pair.holder.hold(*chunks)
    assert await pair.peer.fetch_chunk(digests[0], 5.0) == chunks[0]
    assert await asyncio.gather(*(pair.peer.fetch_chunk(digest, 5.0) for digest in digests)) == chunks


async def test_chunk_that_is_not_held_is_said_so_and_others_still_come(pair: Pair):
    (digest,) = pair.holder.hold(b"here")
    with pytest.raises(NotHeld):
        await pair.peer.fetch_chunk(bytes(32), 5.0)
    assert await pair.peer.fetch_chunk(digest, 5.0) == b"here"


@pytest.mark.parametrize("content", [b"other bytes", b"", bytes(MAX_CHUNK_BYTES + 1), bytes(3 * 2**20)])
async def test_other_bytes_than_were_asked_for_are_forged(pair: Pair, content: bytes):
    pair.holder.chunks[digest_of(b"asked")] = content
    pair.holder.chunks[digest_of(content)] = content
    asked = [digest_of(b"asked")] + ([digest_of(content)] if len(content) > MAX_CHUNK_BYTES else [])
    for digest in asked:
        with pytest.raises(Forged):
            await pair.peer.fetch_chunk(digest, 5.0)


async def test_chunk_that_does_not_come_in_time_is_unavailable_and_its_call_ends(pair: Pair):
    (digest,) = pair.holder.hold(b"late")
    pair.holder.gate.clear()
    with pytest.raises(Unavailable, match=r"0\.2 s"):
        await pair.peer.fetch_chunk(digest, 0.2)
    await until(lambda: pair.holder.num_serving == 0, most_s=PROMPT_S)
    pair.holder.gate.set()
    assert await pair.peer.fetch_chunk(digest, 5.0) == b"late"


async def test_closing_the_client_ends_a_chunk_on_its_way_with_unavailable(pair: Pair):
    (digest,) = pair.holder.hold(b"never")
    pair.holder.gate.clear()
    waiting = asyncio.ensure_future(pair.peer.fetch_chunk(digest, 5.0))
    await until(lambda: pair.holder.num_serving == 1)
    await pair.peer.close()
    if isinstance(pair.server, MemoryTransport):
        pair.holder.gate.set()
    with pytest.raises(Unavailable):
        await waiting


async def test_closed_client_is_unavailable_for_every_call(pair: Pair):
    await pair.peer.close()
    for call in (
        pair.peer.fetch_chunk(bytes(32), 5.0),
        pair.peer.fetch(bytes(32), 100, 5.0),
        anext(pair.peer.watch(LINEAGE, 0)),
        anext(pair.peer.subscribe(Cursor(), StreamFilter())),
    ):
        with pytest.raises(Unavailable):
            await call


# --- hostile watchers over gRPC ----------------------------------------------------------------


Node = ServedNode[Holder, SystemClock]


async def open_narrow(node: Node) -> AuthenticatedChannel:
    """A client that takes 16 KiB of an answer and no more until it is read."""
    host, _, port = node.endpoint.rpartition(":")
    der = await fetch_certificate(f"{host}:{port}")
    options = [
        ("grpc.ssl_target_name_override", CERTIFICATE_NAME),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 16 * 1024),
    ]
    credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(der).encode())
    channel = grpc.aio.secure_channel(node.endpoint, credentials, options=options)
    identity, digest = Identity.create(), hashlib.sha256(der).digest()
    return AuthenticatedChannel(channel, node.identity.node_id, digest, identity, RUN, SystemClock())


@pytest.fixture
async def node() -> Node:
    return await serving(Identity.create(), Holder(), SystemClock(), stall_timeout_s=STALL_S)


def stub_of(channel: AuthenticatedChannel) -> Any:
    return pb_grpc.ExchangeServiceStub(channel.channel)


async def body_of(call: Any) -> bytes:
    return b"".join([piece.data async for piece in call])


async def test_nothing_is_given_without_a_session(node: Node):
    (digest,) = node.handler.hold(b"secret")
    await node.handler.append(manifest(1))
    channel = await node.open()
    for metadata in (None, ((SESSION_KEY, bytes(32)),)):
        stub = stub_of(channel)
        watch = stub.Watch(pb.WatchRequest(policy_id=LINEAGE), metadata=metadata)
        assert await status_of(watch) is grpc.StatusCode.UNAUTHENTICATED
        fetched = stub.FetchChunk(pb.FetchChunkRequest(digest=digest), metadata=metadata)
        assert await status_of(fetched) is grpc.StatusCode.UNAUTHENTICATED
    assert node.handler.asked == [] and node.handler.num_asked_chunks == 0


@pytest.mark.parametrize(
    "request_",
    [
        pb.WatchRequest(policy_id=""),
        pb.WatchRequest(policy_id="x" * 129),
        pb.WatchRequest(policy_id=LINEAGE, window=MAX_WINDOW + 1),
        pb.FetchChunkRequest(digest=b""),
        pb.FetchChunkRequest(digest=bytes(33)),
    ],
    ids=["no lineage", "long lineage", "window", "no digest", "long digest"],
)
async def test_request_out_of_bounds_never_reaches_the_handler(node: Node, request_: Any):
    channel = await node.open()
    stub = stub_of(channel)
    method = stub.Watch if isinstance(request_, pb.WatchRequest) else stub.FetchChunk
    assert await status_of(method(request_, metadata=await channel.metadata(5.0))) is grpc.StatusCode.INVALID_ARGUMENT
    assert node.handler.asked == [] and node.handler.num_asked_chunks == 0


async def test_watches_of_one_peer_are_bounded_and_a_slow_reader_is_cut(node: Node):
    await node.handler.append(*(manifest(number, 2**20) for number in range(200)))
    channel = await node.open()
    metadata = await channel.metadata(5.0)
    calls = [stub_of(channel).Watch(pb.WatchRequest(policy_id=LINEAGE), metadata=metadata) for _ in range(7)]
    assert len(calls) == STREAMS_PER_PEER + 1
    await until(lambda: node.handler.num_open == STREAMS_PER_PEER)
    assert (await calls[-1].read()).manifest.body == manifest(0, 2**20).body, "the oldest made room"
    assert node.handler.num_open == STREAMS_PER_PEER
    await until(lambda: node.handler.num_open == 0, most_s=PROMPT_S)  # nobody reads
    assert node.handler.num_read < 150 * STREAMS_PER_PEER
    honest = await node.open()
    call = stub_of(honest).Watch(pb.WatchRequest(policy_id=LINEAGE), metadata=await honest.metadata(5.0))
    assert (await call.read()).manifest.body == manifest(0, 2**20).body


async def test_where_all_streams_are_taken_who_has_the_most_makes_room(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange_servicer, "STREAMS_TOTAL", STREAMS_PER_PEER)
    await node.handler.append(manifest(1))
    channels = [await node.open() for _ in range(4)]

    async def watch(channel: AuthenticatedChannel) -> Any:
        return stub_of(channel).Watch(pb.WatchRequest(policy_id=LINEAGE), metadata=await channel.metadata(5.0))

    calls = [await watch(channels[0]) for _ in range(STREAMS_PER_PEER)]
    for call in calls:
        await call.read()
    for channel, loser in zip(channels[1:], reversed(calls), strict=False):
        calls.append(await watch(channel))
        assert (await calls[-1].read()).manifest.body == manifest(1).body
        assert await loser.code() is grpc.StatusCode.UNAVAILABLE
    assert await status_of(await watch(channels[0])) is grpc.StatusCode.UNAVAILABLE  # it has more than the others
    assert node.handler.num_open == STREAMS_PER_PEER


async def test_chunks_of_one_peer_at_a_time_are_bounded_and_those_of_another_still_come(node: Node):
    (digest,) = node.handler.hold(chunk(1))
    node.handler.gate.clear()
    greedy, honest = await node.open(), await node.open()
    request = pb.FetchChunkRequest(digest=digest)
    metadata = await greedy.metadata(5.0)
    calls = [stub_of(greedy).FetchChunk(request, metadata=metadata) for _ in range(CHUNKS_PER_PEER)]
    await until(lambda: node.handler.num_serving == CHUNKS_PER_PEER)
    assert await status_of(stub_of(greedy).FetchChunk(request, metadata=metadata)) is grpc.StatusCode.UNAVAILABLE
    other = stub_of(honest).FetchChunk(request, metadata=await honest.metadata(5.0))
    node.handler.gate.set()
    for call in (other, *calls):
        assert await body_of(call) == chunk(1)
    assert await body_of(stub_of(greedy).FetchChunk(request, metadata=metadata)) == chunk(1)


async def test_chunks_that_nobody_reads_lose_their_places_to_the_calls_that_wait(node: Node):
    (digest,) = node.handler.hold(chunk(1))
    request = pb.FetchChunkRequest(digest=digest)
    channels = [await open_narrow(node) for _ in range(CHUNKS_TOTAL // CHUNKS_PER_PEER)]
    unread: list[Any] = []
    began_s = asyncio.get_running_loop().time()
    for channel in channels:
        stalling = channel.channel.unary_stream("/swarm.wire.v1.ExchangeService/FetchChunk")  # and never read
        metadata = await channel.metadata(5.0)
        unread += [stalling(request.SerializeToString(), metadata=metadata) for _ in range(CHUNKS_PER_PEER)]
    await until(
        lambda: node.handler.num_asked_chunks == CHUNKS_TOTAL and node.handler.num_serving == 0, most_s=PROMPT_S
    )
    honest = await node.open()
    waiting = stub_of(honest).FetchChunk(request, metadata=await honest.metadata(5.0))
    assert await body_of(waiting) == chunk(1)
    seconds = asyncio.get_running_loop().time() - began_s
    assert STALL_S < seconds < PROMPT_S  # it had to wait until one of them was cut


# --- hostile holders over gRPC -----------------------------------------------------------------


class LyingServer(pb_grpc.ExchangeServiceServicer):
    """Answers with whatever the test says; the last item for ever."""

    def __init__(self, *responses: Any) -> None:
        self.responses = responses
        self.num_sent = 0

    async def Watch(self, request: Any, context: Any) -> None:
        for response in self.responses:
            await context.write(response)
            self.num_sent += 1
        while True:
            await context.write(self.responses[-1])
            self.num_sent += 1

    async def FetchChunk(self, request: Any, context: Any) -> None:
        await context.write(self.responses[0])


def sealed_message(body: bytes, key: int = 32, signature: int = 64) -> pb.WatchResponse:
    return pb.WatchResponse(
        manifest=policy_pb2.SealedManifest(public_key=bytes(key), signature=bytes(signature), body=body)
    )


@pytest.mark.parametrize(
    "response",
    [
        pb.WatchResponse(),
        sealed_message(b"x", key=31),
        sealed_message(b"x", signature=65),
        sealed_message(b""),
        sealed_message(bytes(MAX_MANIFEST_BYTES + 1)),
        pb.WatchResponse(credit=pb.Credit(granted=2**53)),
        pb.WatchResponse(credit=pb.Credit(head_step=2**63)),
    ],
    ids=["nothing", "key", "signature", "empty", "over the bound", "granted", "step"],
)
async def test_endless_garbage_ends_the_watch_at_its_first_item(response: pb.WatchResponse):
    peer = await client_of(LyingServer(response))
    with pytest.raises(Unavailable):
        async for _ in peer.watch(LINEAGE, 0):
            raise AssertionError("an item came through")


async def test_endless_well_formed_garbage_costs_what_the_reader_reads():
    servicer = LyingServer(sealed_message(bytes(2**20)))
    peer = await client_of(servicer)
    assert len(await first(peer.watch(LINEAGE, 0), 3)) == 3
    stream = peer.watch(LINEAGE, 0)
    await anext(stream)
    sent = -1
    while sent != servicer.num_sent:
        sent = servicer.num_sent
        await asyncio.sleep(0.2)
    assert sent < 100  # MiB, of both streams
    await stream.aclose()  # type: ignore[attr-defined]


async def test_manifest_of_100_mb_is_refused_before_it_is_parsed():
    sessions = Sessions(Identity.create(), RUN, SystemClock())
    unlimited = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    pb_grpc.add_ExchangeServiceServicer_to_server(LyingServer(sealed_message(bytes(100_000_000))), unlimited)
    session_grpc.add_SessionServiceServicer_to_server(sessions, unlimited)
    certificate = sessions.certificate
    port = unlimited.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(certificate.key_pem, certificate.pem)])
    )
    await unlimited.start()
    client = transport_of()
    address = PeerAddress(node_id=sessions.identity.node_id, endpoint=f"127.0.0.1:{port}")
    peer = await client.connect(address, 5.0)
    with pytest.raises(Unavailable, match="larger than max"):
        await anext(peer.watch(LINEAGE, 0))


@pytest.mark.parametrize("data", [b"", b"other", bytes(MAX_CHUNK_BYTES + 1), bytes(5 * 2**20)])
async def test_lying_chunk_never_comes_through(data: bytes):
    peer = await client_of(LyingServer(pb.FetchChunkResponse(total_bytes=len(data), data=data)))
    with pytest.raises(Unavailable):
        await peer.fetch_chunk(digest_of(b"asked"), 5.0)
    if len(data) > MAX_CHUNK_BYTES:
        with pytest.raises(Unavailable):
            await peer.fetch_chunk(digest_of(data), 5.0)
