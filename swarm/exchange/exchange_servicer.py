"""Service for peers of a node: its groups, its manifests and its chunks of weights.

Invariant: a peer that reads slowly, sends nothing or lies costs a bounded number of bounded streams and chunks;
back-pressure is gRPC's own flow control, so no queue of groups or manifests exists here. A stream ends when nothing is
read for the stall timeout, and a chunk when others wait for its slot. If all streams are taken, a peer of lower
standing, or else the subnet or peer with the most streams, loses one, or the new stream is refused. Every message waits
for the upload limit, and no other module sends groups, manifests or chunks to peers.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar, cast

from swarm.errors import Unavailable
from swarm.interfaces import ExchangeHandler, StreamItem
from swarm.peers.send_order import UploadLimit
from swarm.trust_policy import STREAMS_OF_NEWCOMERS, STREAMS_PER_PEER, STREAMS_TOTAL
from swarm.types import NodeId, StreamFilter
from swarm.weight_sync.weight_server import CHUNK_STALL_S, ChunkSlots
from swarm.wire.adverts import cursor_from_message, cursor_to_message
from swarm.wire.connection_limits import peer_subnet
from swarm.wire.envelopes import sealed_to_bytes, sealed_to_message
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.server import Sessions
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc
from swarm.wire.weights import require_digest, watch_from_message, watched_to_message

FETCH_BYTES: Final = 2**18  # most of a group or chunk in one message: a broken connection loses no more
INLINE_BYTES: Final = 2**20  # a larger group travels as a notice and is fetched

Piece = TypeVar("Piece", pb.FetchResponse, pb.FetchChunkResponse)


class ExchangeServicer(pb_grpc.ExchangeServiceServicer):
    """Answers calls of peers from an ExchangeHandler."""

    def __init__(
        self,
        handler: ExchangeHandler,
        sessions: Sessions,
        stall_timeout_s: float,
        standing: Callable[[NodeId], int] = lambda node_id: 0,
        note_call: Callable[[NodeId, str], None] = lambda node_id, subnet: None,
        upload: UploadLimit | None = None,
    ) -> None:
        """Creates the service. A stream ends after `stall_timeout_s` without a read; `upload` None: no upload limit."""
        self._standing, self._note_call, self._upload = standing, note_call, upload
        self._handler, self._sessions, self._stall_timeout_s = handler, sessions, stall_timeout_s
        self._streams: dict[NodeId, list[asyncio.Timeout]] = {}  # timeouts that end them, oldest first
        self._subnets: dict[NodeId, str] = {}  # of those peers
        self._chunks = ChunkSlots(min(stall_timeout_s, CHUNK_STALL_S))

    @rpc
    async def Subscribe(self, request: pb.SubscribeRequest, context: Context) -> None:
        """Streams groups after the cursor, then new ones as they come, for as long as the peer reads."""
        peer = self._sessions.require(context)
        cursor = cursor_from_message(request.cursor)
        async with self._one_stream(peer, context):
            wanted = StreamFilter(
                relay=request.relay,
                wants_zero_variance=request.zero_variance,
                wants_turn_signal=request.turn_signal,
                wants_commitments=request.commitments,
            )
            items = cast(Any, self._handler.subscribe(peer, cursor, wanted))
            async with aclosing(items):
                async for item in items:
                    await self._write(peer, context, _response_of(item))

    @rpc
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Sends a held group from an offset on."""
        peer = self._sessions.require(context)
        async with self._one_stream(peer, context):
            data = sealed_to_bytes(await self._handler.fetch(peer, request.digest))
            for piece in _pieces(data, request.offset, pb.FetchResponse):
                await self._write(peer, context, piece)

    @rpc
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        """Streams the held manifests of a lineage, then new ones and credit, for as long as the peer reads."""
        peer = self._sessions.require(context)
        policy_id, window = watch_from_message(request)
        async with self._one_stream(peer, context):
            items = cast(Any, self._handler.watch(peer, policy_id, window))
            async with aclosing(items):
                async for item in items:
                    await self._write(peer, context, watched_to_message(item))

    @rpc
    async def FetchChunk(self, request: pb.FetchChunkRequest, context: Context) -> None:
        """Sends a held chunk of weights from an offset on."""
        peer = self._sessions.require(context)
        digest = require_digest(request.digest)
        call = await self._chunks.acquire(peer, context)
        data = await self._handler.chunk(peer, digest)
        for piece in _pieces(data, request.offset, pb.FetchChunkResponse):
            if self._upload is not None:
                subnet = peer_subnet(context.peer())
                await self._chunks.held_up(call, self._upload.take(peer, subnet, piece.ByteSize()))
            await context.write(piece)  # a peer that does not read loses its slot only to others

    async def _write(self, peer: NodeId, context: Context, response: Any) -> None:
        if self._upload is not None:
            await self._upload.take(peer, peer_subnet(context.peer()), response.ByteSize())
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await context.write(response)
        except TimeoutError:
            raise Unavailable(f"nothing was read for {self._stall_timeout_s} s; begin again where you are") from None

    @asynccontextmanager
    async def _one_stream(self, peer: NodeId, context: Context) -> AsyncGenerator[None]:
        """Counts a stream while it is open. Raises Unavailable if there is no room, or if the stream must make room."""
        subnet = peer_subnet(context.peer())
        self._note_call(peer, subnet)
        own = self._streams.get(peer, [])
        if len(own) >= STREAMS_PER_PEER:  # the connection of the oldest may be dead
            own.pop(0).reschedule(asyncio.get_running_loop().time())
        elif sum(map(len, self._streams.values())) >= STREAMS_TOTAL:
            self._make_room(peer, subnet, len(own) + 1)
        async with _ended_by_timeout() as ending:
            self._streams.setdefault(peer, []).append(ending)
            self._subnets[peer] = subnet
            try:
                yield
            finally:
                own = self._streams.get(peer, [])
                if ending in own:  # else it made room
                    own.remove(ending)
                if not own:
                    self._streams.pop(peer, None)
                    self._subnets.pop(peer, None)

    def _make_room(self, peer: NodeId, subnet: str, num_own: int) -> None:
        """Ends a stream to make room for stream number `num_own` of `peer`. Raises Unavailable if none has to end.

        Peers of lower standing lose a stream while they have more than STREAMS_OF_NEWCOMERS together. Otherwise the
        subnet with the most streams loses one if it has at least two more than the caller's; otherwise the peer with
        the most, if it has more than `num_own`. Keys are free: by key alone, 256 keys of one address would hold every
        stream.
        """
        standing = self._standing(peer)
        lower = {other: own for other, own in self._streams.items() if own and self._standing(other) < standing}
        if sum(map(len, lower.values())) > STREAMS_OF_NEWCOMERS:
            self._end_one_of(lower)
            return
        others = {other: own for other, own in self._streams.items() if own and self._standing(other) <= standing}
        if sum(map(len, others.values())) < STREAMS_OF_NEWCOMERS:  # less than the part of this standing
            others = {other: own for other, own in self._streams.items() if own}
        num_of = self._num_of_subnets(others)
        is_shared = max(num_of.values(), default=0) <= num_of[subnet] + 1  # by subnet there is nothing to take
        if is_shared and max(map(len, others.values()), default=0) <= num_own:
            raise Unavailable(f"{STREAMS_TOTAL} streams are open; try another holder")
        self._end_one_of(others, by_subnet=not is_shared)

    def _end_one_of(self, streams: Mapping[NodeId, list[asyncio.Timeout]], *, by_subnet: bool = True) -> None:
        """Ends the newest stream of the peer with the most; `by_subnet`: in the subnet with the most streams."""
        num_of = self._num_of_subnets(streams)
        victim = max(streams, key=lambda peer: (by_subnet and num_of[self._subnets[peer]], len(streams[peer])))
        streams[victim].pop().reschedule(asyncio.get_running_loop().time())

    def _num_of_subnets(self, streams: Mapping[NodeId, list[asyncio.Timeout]]) -> Counter[str]:
        num_of = Counter[str]()
        for peer, own in streams.items():
            num_of[self._subnets[peer]] += len(own)
        return num_of


@asynccontextmanager
async def _ended_by_timeout() -> AsyncGenerator[asyncio.Timeout]:
    """Yields a timeout without a deadline; the body ends with Unavailable once the timeout is rescheduled to now."""
    ending = asyncio.timeout(None)
    try:
        async with ending:
            yield ending
    except TimeoutError:
        if not ending.expired():
            raise
        raise Unavailable("it made room for one of others with fewer, or a newer one of its own; begin again") from None


def _pieces(data: bytes, first: int, kind: Callable[..., Piece]) -> Iterator[Piece]:
    """The messages that carry a body from offset `first` on; none if the body ends there."""
    for offset in range(first, len(data), FETCH_BYTES):
        yield kind(total_bytes=len(data), offset=offset, data=data[offset : offset + FETCH_BYTES])


def _response_of(item: StreamItem) -> pb.SubscribeResponse:
    response = pb.SubscribeResponse(
        cursor=cursor_to_message(item.cursor),
        digest=item.digest,
        size_bytes=item.size_bytes,
        commitments=item.commitments,
    )
    if item.sealed is not None and item.sealed.size_bytes <= INLINE_BYTES:
        response.group.CopyFrom(sealed_to_message(item.sealed))
    else:
        response.producer = item.producer
    return response
