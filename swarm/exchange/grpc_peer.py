"""One connection to a peer: what we ask of it. What it may ask of us is in `exchange_servicer.py`.

Invariant: what a peer sends is bounded before it is read, and nothing of it is opened here.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from swarm.errors import Forged, NotHeld, TooLarge, Unavailable
from swarm.exchange.begun_bodies import BegunBodies, FalsePiece, append_piece
from swarm.exchange.group_stream import SUBSCRIBE_BATCH
from swarm.identity import is_hex_digest
from swarm.interfaces import StreamItem
from swarm.relay.relay_client import RelayedSocket
from swarm.types import Credit, Cursor, Digest, NodeId, Refused, SealedGroup, SealedManifest, StreamFilter, short
from swarm.wire.adverts import cursor_from_message, cursor_to_message
from swarm.wire.envelopes import MAX_ENVELOPE_BYTES, sealed_from_bytes, sealed_from_message
from swarm.wire.grpc_errors import calling
from swarm.wire.rollout_groups import Malformed
from swarm.wire.session import AuthenticatedChannel
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc
from swarm.wire.weights import MAX_CHUNK_BYTES, watch_to_message, watched_from_message

_HASH_IN_THREAD_BYTES: Final = 2**20


class GrpcPeer:
    """One authenticated connection to a peer; implements `swarm.interfaces.PeerClient`, where its methods are told.

    Nothing that it returns was opened: signature and content are for admission to check.
    """

    def __init__(
        self,
        channel: AuthenticatedChannel,
        call_timeout_s: float,
        registry: "set[GrpcPeer]",
        begun: BegunBodies,
        way: RelayedSocket | None = None,
    ) -> None:
        self._channel = channel
        self._way = way  # through a relay
        self._call_timeout_s = call_timeout_s
        self._registry = registry
        self._begun = begun
        self._stub: Any = pb_grpc.ExchangeServiceStub(channel.channel)

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
        found = await asyncio.to_thread(_sha256, data)
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
        """A whole body, from where the last transfer of it from this peer broke off; its content was not checked."""
        data = self._begun.take(self.node_id, digest)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._fetch_rest(data, method, request, max_bytes, what):
                    continue
        except BaseException as error:  # also where nobody waits for it any more
            if not isinstance(error, FalsePiece | TooLarge):
                self._begun.keep(self.node_id, digest, data)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{what}: {len(data)} bytes within {timeout_s} s") from None
            raise
        return bytes(data)

    async def _fetch_rest(
        self, data: bytearray, method: Any, request: Callable[..., Any], max_bytes: int, what: str
    ) -> bool:
        """Appends to `data` what one stream brings; True when whole, False when broken off after some progress."""
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
        if self._way is not None:
            await self._way.close()


def _sha256(data: bytes) -> Digest:
    return hashlib.sha256(data).digest()


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
