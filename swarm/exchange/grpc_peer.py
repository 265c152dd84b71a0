"""One connection to a peer, for our calls; `exchange_servicer.py` answers the peer's calls.

Invariant: the data of a peer is bounded before it is read or kept, and no group is opened here.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from swarm.clock import Clock
from swarm.errors import Forged, NotHeld, TooLarge, Unavailable
from swarm.exchange.exchange_servicer import FETCH_BYTES
from swarm.exchange.group_stream import SUBSCRIBE_BATCH
from swarm.identity import is_hex_digest
from swarm.interfaces import StreamItem
from swarm.types import Credit, Cursor, Digest, NodeId, Refused, SealedGroup, SealedManifest, StreamFilter, short
from swarm.wire.adverts import cursor_from_message, cursor_to_message
from swarm.wire.envelopes import MAX_ENVELOPE_BYTES, sealed_from_bytes, sealed_from_message
from swarm.wire.grpc_errors import calling
from swarm.wire.rollout_groups import Malformed
from swarm.wire.session import AuthenticatedChannel
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc
from swarm.wire.weights import MAX_CHUNK_BYTES, watch_to_message, watched_from_message

LEAST_PIECE_BYTES: Final = 2**16  # least piece, except the last: byte by byte, one body would take a million calls
MAX_BEGUN_BYTES: Final = 16 * 2**20
KEPT_S: Final = 120.0  # an honest retry comes sooner
_HASH_IN_THREAD_BYTES: Final = 2**20
CloseWay = Callable[[], Awaitable[None]]  # ends the socket that a connection goes through


class FalsePiece(Unavailable):
    """A peer sent a piece that does not continue the body, or no piece; the kept beginning of the body is useless."""


class BegunBodies:
    """Beginnings of bodies whose transfer broke off, for the next fetch from the same peer.

    Beginnings are kept by peer, so a false one spoils only its sender's transfers. Beyond `max_bytes` the peer with the
    most bytes loses its oldest. `keep` drops those older than KEPT_S, or many keys could fill `max_bytes` for ever.
    """

    def __init__(self, clock: Clock, max_bytes: int = MAX_BEGUN_BYTES) -> None:
        self._clock, self._max_bytes = clock, max_bytes
        self._bodies: dict[tuple[NodeId, Digest], tuple[bytearray, float]] = {}  # and since when; the oldest first

    def take(self, peer: NodeId, digest: Digest) -> bytearray:
        """Removes and returns the beginning of a body; empty if none is kept."""
        return self._bodies.pop((peer, digest), (bytearray(), 0.0))[0]

    def keep(self, peer: NodeId, digest: Digest, data: bytearray) -> None:
        """Keeps the beginning of a body for the next `take`; an empty one is not kept."""
        now_s = self._clock.monotonic_s()
        self._bodies.pop((peer, digest), None)
        if data:
            self._bodies[peer, digest] = data, now_s
        for key in [key for key, (_, since_s) in self._bodies.items() if since_s + KEPT_S < now_s]:
            del self._bodies[key]
        while sum(len(body) for body, _ in self._bodies.values()) > self._max_bytes:
            num_bytes = Counter[NodeId]()
            for (owner, _), (body, _) in self._bodies.items():
                num_bytes[owner] += len(body)
            most, _ = num_bytes.most_common(1)[0]
            del self._bodies[next(key for key in self._bodies if key[0] == most)]


@dataclass(eq=False, repr=False)
class GrpcPeer:
    """One authenticated connection to a peer; implements `swarm.interfaces.PeerClient`, whose docstrings hold.

    Groups are returned unopened: admission checks their signature and content.
    """

    _channel: AuthenticatedChannel
    _call_timeout_s: float
    _registry: "set[GrpcPeer]"  # of open connections
    _begun: BegunBodies
    _close_way: CloseWay | None = None

    def __post_init__(self) -> None:
        self._stub: Any = pb_grpc.ExchangeServiceStub(self._channel.channel)

    @property
    def node_id(self) -> NodeId:
        return self._channel.node_id

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        what = f"subscription to {short(self.node_id)}"
        request = pb.SubscribeRequest(
            cursor=cursor_to_message(cursor),
            relay=wanted.relay,
            zero_variance=wanted.wants_zero_variance,
            turn_signal=wanted.wants_turn_signal,
            commitments=wanted.wants_commitments,
        )
        call = self._stub.Subscribe(request, metadata=await self._metadata())
        try:
            with calling(what):
                async for response in call:
                    yield _item_of(response, what)
        finally:
            call.cancel()
        raise Unavailable(f"{what}: the peer ended it")

    async def watch(self, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        what = f"watch of {short(policy_id)} at {short(self.node_id)}"
        call = self._stub.Watch(watch_to_message(policy_id, window), metadata=await self._metadata())
        try:
            with calling(what, NotHeld):
                async for response in call:
                    yield watched_from_message(response)
        finally:
            call.cancel()
        raise Unavailable(f"{what}: the peer ended it")

    async def fetch_chunk(self, digest: Digest, timeout_s: float) -> bytes:
        what = f"chunk {short(digest)} from {short(self.node_id)}"
        request = partial(pb.FetchChunkRequest, digest=digest)
        try:
            data = await self._fetch_body(digest, self._stub.FetchChunk, request, MAX_CHUNK_BYTES, timeout_s, what)
        except (FalsePiece, TooLarge) as error:
            raise Forged(str(error)) from None
        found = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        if found != digest:
            raise Forged(f"{what}: the content hashes to {short(found)}")
        return data

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        what = f"fetch of {short(digest)} from {short(self.node_id)}"
        most, request = max_bytes + MAX_ENVELOPE_BYTES, partial(pb.FetchRequest, digest=digest)
        data = await self._fetch_body(digest, self._stub.Fetch, request, most, timeout_s, what)
        if len(data) > _HASH_IN_THREAD_BYTES:
            sealed = await asyncio.to_thread(sealed_from_bytes, data)
        else:
            sealed = sealed_from_bytes(data)
        if isinstance(sealed, Refused):
            raise Unavailable(f"{what}: {sealed.detail}")
        if sealed.digest != digest:
            raise Unavailable(f"{what}: the content hashes to {short(sealed.digest)}")
        return sealed

    async def _fetch_body(
        self, digest: Digest, method: Any, request: Callable[..., Any], max_bytes: int, timeout_s: float, what: str
    ) -> bytes:
        """Returns a whole body, continued where the last transfer from this peer broke off, without a content check."""
        data = self._begun.take(self.node_id, digest)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._fetch_rest(data, method, request, max_bytes, what):
                    continue
        except BaseException as error:  # also when it is cancelled
            if not isinstance(error, FalsePiece | TooLarge):
                self._begun.keep(self.node_id, digest, data)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{what}: {len(data)} bytes within {timeout_s} s") from None
            raise
        return bytes(data)

    async def _fetch_rest(
        self, data: bytearray, method: Any, request: Callable[..., Any], max_bytes: int, what: str
    ) -> bool:
        """Appends the data of one stream. True if the body is whole; False if the stream broke off after progress."""
        before = len(data)
        total = None
        call = method(request(offset=before), metadata=await self._metadata())
        try:
            with calling(what, NotHeld):
                async for response in call:
                    total = append_piece(data, response, total, max_bytes, what)
                    if len(data) == total:
                        return True
        except Unavailable as error:
            if len(data) == before or isinstance(error, FalsePiece):
                raise
        finally:
            call.cancel()
        if len(data) == before:
            raise FalsePiece(f"{what}: the peer ended it at {before} bytes")
        return False

    async def _metadata(self) -> Any:
        return await self._channel.metadata(self._call_timeout_s)

    async def close(self) -> None:
        self._registry.discard(self)
        await self._channel.close()
        if self._close_way is not None:
            await self._close_way()


def _item_of(response: pb.SubscribeResponse, what: str) -> StreamItem:
    commitments = tuple(response.commitments)
    if len(response.digest) != 32 and (response.digest or not commitments):
        raise Unavailable(f"{what}: digest of {len(response.digest)} bytes, expected 32")
    if len(commitments) > SUBSCRIBE_BATCH or any(len(commitment) != 32 for commitment in commitments):
        raise Unavailable(f"{what}: {len(commitments)} commitments, expected at most {SUBSCRIBE_BATCH} of 32 bytes")
    if response.producer and not is_hex_digest(response.producer):
        raise Unavailable(f"{what}: a producer that is no node id")
    sealed = None
    if response.digest and response.HasField("group"):
        # The claimed digest is kept: admission hashes the body once and refuses a false one by name.
        sealed = sealed_from_message(response.group, response.digest)
        if isinstance(sealed, Refused):
            raise Unavailable(f"{what}: {sealed.detail}")
    try:
        cursor = cursor_from_message(response.cursor)
    except Malformed as error:
        raise Unavailable(f"{what}: {error.detail}") from None
    return StreamItem(
        cursor=cursor,
        digest=response.digest,
        size_bytes=response.size_bytes,
        sealed=sealed,
        commitments=commitments,
        producer=response.producer,
    )


def append_piece(data: bytearray, response: Any, total: int | None, max_bytes: int, what: str) -> int:
    """Appends a piece to `data`; returns the size of the whole body in bytes, as the piece names it.

    Raises:
        TooLarge: that size exceeds `max_bytes`.
        FalsePiece: that size differs from `total` (None at the start of a stream), or the piece has a wrong offset or
            length.
    """
    size = response.total_bytes
    if size > max_bytes:
        raise TooLarge(f"{what}: {size} bytes exceed {max_bytes}")
    if total is not None and size != total:
        raise FalsePiece(f"{what}: the total changed from {total} to {size} bytes")
    if response.offset != len(data):
        raise FalsePiece(f"{what}: piece at {response.offset}, expected {len(data)}")
    rest = size - len(data)
    if not 0 < min(LEAST_PIECE_BYTES, rest) <= len(response.data) <= min(FETCH_BYTES, rest):
        raise FalsePiece(f"{what}: piece of {len(response.data)} bytes at {len(data)} of {size}")
    data += response.data
    return size
