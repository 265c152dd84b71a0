"""Sealing and opening: groups and adverts as signed bytes, and back through every check that needs no node state.

Invariant: nothing is allocated above the caller's bound and nothing is parsed before its signature
holds, and no input raises: hostile bytes become a `Refused` value (groups) or None (adverts).
"""

import hashlib
import math
import re
import threading
from typing import Final

import zstandard
from google.protobuf.message import DecodeError

from swarm.errors import TooLarge
from swarm.identity import (
    DOMAIN_ADVERT,
    DOMAIN_GROUP,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    Verify,
    node_id_of,
    verify,
)
from swarm.types import (
    Advert,
    Correction,
    Cursor,
    Digest,
    RefusalReason,
    Refused,
    Role,
    RolloutGroup,
    SealedGroup,
)
from swarm.wire.field_scan import fields_are_bounded
from swarm.wire.rollout_groups import (
    MAX_STEP,
    MAX_TASK_ID,
    Malformed,
    body_to_group,
    decimal,
    group_to_body,
    require_finite,
    version_from_message,
    version_to_message,
)
from swarm.wire.v1 import advert_pb2, rollout_pb2

__all__ = [
    "MAX_ADVERT_BYTES",
    "MAX_ADVERT_TTL_S",
    "MAX_ENVELOPE_BYTES",
    "advert_from_message",
    "advert_to_message",
    "body_to_group",
    "cursor_from_message",
    "cursor_to_message",
    "group_to_body",
    "open_advert",
    "open_group",
    "seal_advert",
    "seal_group",
    "sealed_from_bytes",
    "sealed_from_message",
    "sealed_to_bytes",
    "sealed_to_message",
]

MAX_ADVERT_BYTES: Final = 512
MAX_ADVERT_TTL_S: Final = 300.0
MAX_ENVELOPE_BYTES: Final = 256  # key, signature, codec and lengths around the body of a sealed group
MAX_ENDPOINTS: Final = 4
MAX_EPOCH_CHARS: Final = 64
_ZSTD_LEVEL: Final = 1
_MAX_REWARD: Final = 1e6

_ENDPOINT: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,100}):[0-9]{1,5}")
_NODE_ID: Final = re.compile(r"[0-9a-f]{64}")
_RUN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,40}")

ROLE_NUMBERS: Final = {
    Role.TRAINER: advert_pb2.ROLE_TRAINER,
    Role.GENERATOR: advert_pb2.ROLE_GENERATOR,
    Role.RELAY: advert_pb2.ROLE_RELAY,
}
ROLES_BY_NUMBER: Final = {number: role for role, number in ROLE_NUMBERS.items()}
_CORRECTIONS: Final = {
    Correction.EXACT: advert_pb2.CORRECTION_EXACT,
    Correction.NO_LOGPROBS: advert_pb2.CORRECTION_NO_LOGPROBS,
    Correction.TEXT_ONLY: advert_pb2.CORRECTION_TEXT_ONLY,
}
_CORRECTIONS_BACK: Final = {number: correction for correction, number in _CORRECTIONS.items()}


# --- groups ------------------------------------------------------------------------------------


def _signed_part(is_compressed: bool, digest: Digest) -> bytes:
    codec = rollout_pb2.BODY_CODEC_ZSTD if is_compressed else rollout_pb2.BODY_CODEC_IDENTITY
    return bytes([codec]) + digest


def seal_group(group: RolloutGroup, identity: Identity) -> SealedGroup:
    """Serialises, compresses where that is smaller, and signs one of our groups.

    Nothing is checked here: a group that breaks a bound is refused by whoever opens it.

    Raises:
        ValueError: the group names another producer than the identity, or a number does not fit the schema.
    """
    if group.producer != identity.node_id:
        raise ValueError(f"group of {group.producer[:8]} cannot be sealed by {identity.node_id[:8]}")
    plain = group_to_body(group).SerializeToString()
    packed = _zstd.compressor.compress(plain)
    is_compressed = len(packed) < len(plain)
    body = packed if is_compressed else plain
    digest = hashlib.sha256(body).digest()
    return SealedGroup(
        digest=digest,
        producer=identity.node_id,
        public_key=identity.public_key,
        signature=identity.sign(DOMAIN_GROUP, _signed_part(is_compressed, digest)),
        is_compressed=is_compressed,
        body=body,
    )


def open_group(sealed: SealedGroup, max_bytes: int, verify: Verify = verify) -> RolloutGroup | Refused:
    """The group inside, after every check that needs neither vocabulary, task, clock nor history.

    In order: size, key hashes to producer, signature, digest, decompression, protobuf, structure.

    Args:
        sealed: from anywhere.
        max_bytes: bound of the body, both as it travelled and decompressed.
        verify: judges the signature; a simulation may bring its own.
    """
    try:
        return _open_group(sealed, max_bytes, verify)
    except Malformed as error:
        return error.refused(sealed.producer, sealed.digest)


def _open_group(sealed: SealedGroup, max_bytes: int, verify: Verify) -> RolloutGroup:
    if sealed.size_bytes > max_bytes:
        raise Malformed(RefusalReason.TOO_LARGE, f"{sealed.size_bytes} bytes exceed {max_bytes}")
    if node_id_of(sealed.public_key) != sealed.producer:
        raise Malformed(RefusalReason.FORGED_PRODUCER, "the key does not hash to the producer")
    if not verify(sealed.public_key, DOMAIN_GROUP, _signed_part(sealed.is_compressed, sealed.digest), sealed.signature):
        raise Malformed(RefusalReason.WRONG_SIGNATURE, "the signature does not fit key, codec and digest")
    if hashlib.sha256(sealed.body).digest() != sealed.digest:
        raise Malformed(RefusalReason.WRONG_DIGEST, "the body does not hash to the digest")
    plain = _decompress(sealed.body, max_bytes) if sealed.is_compressed else sealed.body
    if not fields_are_bounded(plain):
        raise Malformed(RefusalReason.MALFORMED, "not a group, or one of too many fields")
    try:
        body = rollout_pb2.GroupBody.FromString(plain)
    except DecodeError:
        raise Malformed(RefusalReason.MALFORMED, f"{len(plain)} bytes that are no GroupBody") from None
    group = body_to_group(body, sealed.producer)
    require_finite((rollout.claimed_reward for rollout in group.rollouts), "claimed reward")
    if any(rollout.trace is not None and rollout.trace.token_ids.size == 0 for rollout in group.rollouts):
        raise Malformed(RefusalReason.BAD_TOKENS, "a trace without tokens")
    return group


class _Zstd(threading.local):
    """Contexts of one thread: making one costs more than using it on a small group, and two threads may not share."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
        self._decompressors: dict[int, zstandard.ZstdDecompressor] = {}  # by window; a process has one or two bounds

    def decompressor(self, max_bytes: int) -> zstandard.ZstdDecompressor:
        """One that refuses a window beyond the bound."""
        window = max(1 << 10, 1 << max_bytes.bit_length())
        if window not in self._decompressors:
            self._decompressors[window] = zstandard.ZstdDecompressor(max_window_size=window)
        return self._decompressors[window]


_zstd = _Zstd()


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """One zstd frame that states its size; the stated size is checked before anything is allocated."""
    # A skippable frame is none of ours, and the library would allocate the size that it states.
    if data[:4] != zstandard.FRAME_HEADER:
        raise Malformed(RefusalReason.MALFORMED, "not a zstd frame")
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise Malformed(RefusalReason.MALFORMED, "a zstd frame without its content size")
        if size > max_bytes:
            raise Malformed(RefusalReason.TOO_LARGE, f"{size} bytes after decompression exceed {max_bytes}")
        # With the size known the whole frame is decoded into one buffer of that size: no window besides.
        plain = _zstd.decompressor(max_bytes).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        raise Malformed(RefusalReason.MALFORMED, "not one whole zstd frame") from None
    return plain


def sealed_to_message(sealed: SealedGroup) -> rollout_pb2.SealedGroup:
    """A sealed group as a message; its digest and producer follow from body and key."""
    codec = rollout_pb2.BODY_CODEC_ZSTD if sealed.is_compressed else rollout_pb2.BODY_CODEC_IDENTITY
    return rollout_pb2.SealedGroup(
        public_key=sealed.public_key, signature=sealed.signature, codec=codec, body=sealed.body
    )


def sealed_from_message(message: rollout_pb2.SealedGroup, claimed: Digest | None = None) -> SealedGroup | Refused:
    """The sealed group in a message, unopened: only key, signature and codec have their form checked.

    Args:
        message: from anywhere, of bounded size.
        claimed: the digest that the sender gave beside it, for `open_group` to judge; None hashes the body.
    """
    form = (len(message.public_key), len(message.signature))
    if form != (PUBLIC_KEY_BYTES, SIGNATURE_BYTES):
        return Refused(reason=RefusalReason.MALFORMED, detail=f"key and signature of {form} bytes, expected (32, 64)")
    if message.codec not in (rollout_pb2.BODY_CODEC_IDENTITY, rollout_pb2.BODY_CODEC_ZSTD):
        return Refused(reason=RefusalReason.MALFORMED, detail=f"unknown codec {int(message.codec)}")
    return SealedGroup(
        digest=hashlib.sha256(message.body).digest() if claimed is None else claimed,
        producer=node_id_of(message.public_key),
        public_key=message.public_key,
        signature=message.signature,
        is_compressed=message.codec == rollout_pb2.BODY_CODEC_ZSTD,
        body=message.body,
    )


def sealed_to_bytes(sealed: SealedGroup) -> bytes:
    """A sealed group as bytes for disk or transfer."""
    return sealed_to_message(sealed).SerializeToString(deterministic=True)


def sealed_from_bytes(data: bytes) -> SealedGroup | Refused:
    """The sealed group in bytes whose length the caller has bounded. Unopened: see `open_group`."""
    try:
        message = rollout_pb2.SealedGroup.FromString(data)
    except DecodeError:
        return Refused(reason=RefusalReason.MALFORMED, detail=f"{len(data)} bytes that are no SealedGroup")
    return sealed_from_message(message)


# --- adverts -----------------------------------------------------------------------------------


def cursor_to_message(cursor: Cursor) -> advert_pb2.Cursor:
    """A cursor as a message."""
    return advert_pb2.Cursor(epoch=cursor.epoch, sequence=cursor.sequence)


def cursor_from_message(message: advert_pb2.Cursor) -> Cursor:
    """A cursor within its bounds. Raises Malformed."""
    if len(message.epoch) > MAX_EPOCH_CHARS or message.sequence >= MAX_TASK_ID:
        raise Malformed(RefusalReason.MALFORMED, f"cursor beyond {MAX_EPOCH_CHARS} characters or 2**63")
    return Cursor(epoch=message.epoch, sequence=message.sequence)


def advert_to_message(advert: Advert) -> advert_pb2.Advert:
    """An advert as a message; the node id is left to the key."""
    return advert_pb2.Advert(
        run_id=advert.run_id,
        endpoints=advert.endpoints,
        roles=[ROLE_NUMBERS[role] for role in advert.roles],
        tokenizer_digest=advert.tokenizer_digest,
        head=version_to_message(advert.head),
        oldest_step=advert.oldest_step,
        num_groups=advert.num_groups,
        reward_mean=advert.reward_mean,
        reward_std=advert.reward_std,
        correction=_CORRECTIONS[advert.correction],
        held_bytes=advert.held_bytes,
        cursor=cursor_to_message(advert.cursor),
        expires_at_s=advert.expires_at_s,
    )


def advert_from_message(message: advert_pb2.Advert, node_id: str) -> Advert | None:
    """An advert within its bounds (its expiry is not judged), or None."""
    floats = (message.reward_mean, message.reward_std, message.expires_at_s)
    is_whole = (
        _RUN_ID.fullmatch(message.run_id) is not None
        and len(message.endpoints) <= MAX_ENDPOINTS
        and all(is_endpoint(endpoint) for endpoint in message.endpoints)
        and len(message.roles) == len(set(message.roles) & set(ROLES_BY_NUMBER))
        and len(message.tokenizer_digest) in (0, 32)
        and message.oldest_step < MAX_STEP
        and message.held_bytes < MAX_TASK_ID
        and message.correction in _CORRECTIONS_BACK
        and all(map(math.isfinite, floats))
        and max(abs(message.reward_mean), abs(message.reward_std)) <= _MAX_REWARD
    )
    if not is_whole:
        return None
    try:
        head, cursor = version_from_message(message.head), cursor_from_message(message.cursor)
    except Malformed:
        return None
    return Advert(
        node_id=node_id,
        run_id=message.run_id,
        endpoints=tuple(message.endpoints),
        roles=tuple(ROLES_BY_NUMBER[role] for role in message.roles),
        tokenizer_digest=message.tokenizer_digest,
        head=head,
        oldest_step=message.oldest_step,
        num_groups=message.num_groups,
        reward_mean=decimal(message.reward_mean),
        reward_std=decimal(message.reward_std),
        correction=_CORRECTIONS_BACK[message.correction],
        held_bytes=message.held_bytes,
        cursor=cursor,
        expires_at_s=message.expires_at_s,
    )


def is_endpoint(text: str) -> bool:
    """True for host:port with a usable port and nothing but the characters of a name or address."""
    return _ENDPOINT.fullmatch(text) is not None and 0 < int(text.rpartition(":")[2]) < 65536


def is_node_id(text: str) -> bool:
    """True for 64 lower-case hex digits."""
    return _NODE_ID.fullmatch(text) is not None


def seal_advert(advert: Advert, identity: Identity) -> bytes:
    """Our advert as signed bytes for the directory.

    Raises:
        ValueError: the advert is another node's.
        TooLarge: over MAX_ADVERT_BYTES; endpoints or run id are too long.
    """
    if advert.node_id != identity.node_id:
        raise ValueError(f"advert of {advert.node_id[:8]} cannot be sealed by {identity.node_id[:8]}")
    body = advert_to_message(advert).SerializeToString()
    signature = identity.sign(DOMAIN_ADVERT, body)
    data = advert_pb2.SignedAdvert(public_key=identity.public_key, signature=signature, body=body).SerializeToString()
    if len(data) > MAX_ADVERT_BYTES:
        raise TooLarge(f"advert of {len(data)} bytes exceeds {MAX_ADVERT_BYTES}: shorten endpoints {advert.endpoints}")
    return data


def open_advert(data: bytes, now_s: float, verify: Verify = verify) -> Advert | None:
    """The advert in signed bytes from the directory, or None when anything about it is wrong.

    Args:
        data: from anywhere.
        now_s: wall clock; the advert must expire after it, by MAX_ADVERT_TTL_S at most.
        verify: judges the signature; a simulation may bring its own.
    """
    if len(data) > MAX_ADVERT_BYTES:
        return None
    try:
        signed = advert_pb2.SignedAdvert.FromString(data)
        if not verify(signed.public_key, DOMAIN_ADVERT, signed.body, signed.signature):
            return None
        message = advert_pb2.Advert.FromString(signed.body)
    except DecodeError:
        return None
    if not now_s < message.expires_at_s <= now_s + MAX_ADVERT_TTL_S:
        return None
    return advert_from_message(message, node_id_of(signed.public_key))
