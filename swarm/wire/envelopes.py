"""Sealed groups: rollout groups as signed bytes, with every check that needs no node state.

Invariant: no body above the caller's bound is allocated, no body is parsed before its signature was verified, and no
input raises: hostile bytes become a `Refused` value.
"""

import hashlib
import threading
from typing import Final

import zstandard
from google.protobuf.message import DecodeError

from swarm.identity import (
    DOMAIN_GROUP,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    Verify,
    node_id_of,
    verify,
)
from swarm.types import Digest, RefusalReason, Refused, RolloutGroup, SealedGroup, short
from swarm.wire.group_counts import CountLimits, check_counts
from swarm.wire.rollout_groups import Malformed, body_to_group, group_to_body, require_finite
from swarm.wire.v1 import rollout_pb2

MAX_ENVELOPE_BYTES: Final = 256  # key, signature, codec and lengths around the body of a sealed group
ANY_COUNT: Final = CountLimits()  # the bounds of the schema
_ZSTD_LEVEL: Final = 1


def _signed_part(is_compressed: bool, digest: Digest) -> bytes:
    codec = rollout_pb2.BODY_CODEC_ZSTD if is_compressed else rollout_pb2.BODY_CODEC_IDENTITY
    return bytes([codec]) + digest


def seal_group(group: RolloutGroup, identity: Identity) -> SealedGroup:
    """Serialises, compresses if that makes it smaller, and signs one of our groups, without checking its bounds.

    Raises:
        ValueError: the group names another producer, or a number does not fit the schema.
    """
    if group.producer != identity.node_id:
        raise ValueError(f"group of {group.producer[:8]} cannot be sealed by {identity.node_id[:8]}")
    message = group_to_body(group)
    message.producer = bytes.fromhex(identity.node_id)
    plain = message.SerializeToString()
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


def open_group(
    sealed: SealedGroup, max_bytes: int, counts: CountLimits = ANY_COUNT, verify: Verify = verify
) -> RolloutGroup | Refused:
    """Opens a sealed group with every check that needs neither vocabulary, task, clock nor history.

    Checks, in order: size, producer is hash of key, signature, digest, decompression, counts, protobuf, structure.

    Args:
        sealed: the sealed group, from anywhere.
        max_bytes: bound of the body, both as received and decompressed.
        counts: bounds of the group's content, checked before parsing.
        verify: checks the signature; simulations replace it.

    Returns:
        The group, or the refusal with the first check that failed.
    """
    try:
        return _open_group(sealed, max_bytes, counts, verify)
    except Malformed as error:
        return Refused(reason=error.reason, detail=error.detail, producer=sealed.producer, digest=sealed.digest)


def _open_group(sealed: SealedGroup, max_bytes: int, counts: CountLimits, verify: Verify) -> RolloutGroup:
    if sealed.size_bytes > max_bytes:
        raise Malformed(RefusalReason.TOO_LARGE, f"{sealed.size_bytes} bytes exceed {max_bytes}")
    if node_id_of(sealed.public_key) != sealed.producer:
        raise Malformed(RefusalReason.FORGED_PRODUCER, "the key does not hash to the producer")
    if not verify(sealed.public_key, DOMAIN_GROUP, _signed_part(sealed.is_compressed, sealed.digest), sealed.signature):
        raise Malformed(RefusalReason.WRONG_SIGNATURE, "the signature does not fit key, codec and digest")
    if hashlib.sha256(sealed.body).digest() != sealed.digest:
        raise Malformed(RefusalReason.WRONG_DIGEST, "the body does not hash to the digest")
    plain = _decompress(sealed.body, max_bytes) if sealed.is_compressed else sealed.body
    check_counts(plain, len(sealed.body), counts)
    try:
        body = rollout_pb2.GroupBody.FromString(plain)
    except DecodeError:
        raise Malformed(RefusalReason.MALFORMED, f"{len(plain)} bytes that are no GroupBody") from None
    if body.producer and body.producer.hex() != sealed.producer:
        raise Malformed(RefusalReason.MALFORMED, f"the content of {short(body.producer)} under another key")
    group = body_to_group(body, sealed.producer)
    require_finite((rollout.claimed_reward for rollout in group.rollouts), "claimed reward")
    if any(rollout.trace is not None and rollout.trace.token_ids.size == 0 for rollout in group.rollouts):
        raise Malformed(RefusalReason.BAD_TOKENS, "a trace without tokens")
    return group


class _Zstd(threading.local):
    """zstd contexts of one thread, since threads may not share them and creating one costs more than a small group."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
        self._decompressors: dict[int, zstandard.ZstdDecompressor] = {}  # by window size; a process has one or two

    def decompressor(self, max_bytes: int) -> zstandard.ZstdDecompressor:
        """A decompressor that refuses windows beyond the smallest power of two above `max_bytes`."""
        window = max(1 << 10, 1 << max_bytes.bit_length())
        if window not in self._decompressors:
            self._decompressors[window] = zstandard.ZstdDecompressor(max_window_size=window)
        return self._decompressors[window]


_zstd = _Zstd()


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """The content of one zstd frame; its stated size is checked before anything is allocated. Raises Malformed."""
    # For a skippable frame, which is never ours, the library would allocate the stated size.
    if data[:4] != zstandard.FRAME_HEADER:
        raise Malformed(RefusalReason.MALFORMED, "not a zstd frame")
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise Malformed(RefusalReason.MALFORMED, "a zstd frame without its content size")
        if size > max_bytes:
            raise Malformed(RefusalReason.TOO_LARGE, f"{size} bytes after decompression exceed {max_bytes}")
        # A frame of known size is decoded into one buffer of that size, without a window.
        plain = _zstd.decompressor(max_bytes).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        raise Malformed(RefusalReason.MALFORMED, "not one whole zstd frame") from None
    return plain


def stated_bytes(sealed: SealedGroup) -> int:
    """Most bytes that opening a sealed group handles: the body's length, or its stated decompressed size if larger."""
    if not sealed.is_compressed:
        return len(sealed.body)
    try:
        return max(len(sealed.body), zstandard.frame_content_size(sealed.body))
    except zstandard.ZstdError:  # `open_group` will refuse it
        return len(sealed.body)


def sealed_to_message(sealed: SealedGroup) -> rollout_pb2.SealedGroup:
    """Converts a sealed group to its protobuf message; digest and producer follow from body and key."""
    codec = rollout_pb2.BODY_CODEC_ZSTD if sealed.is_compressed else rollout_pb2.BODY_CODEC_IDENTITY
    return rollout_pb2.SealedGroup(
        public_key=sealed.public_key, signature=sealed.signature, codec=codec, body=sealed.body
    )


def sealed_from_message(message: rollout_pb2.SealedGroup, claimed: Digest | None = None) -> SealedGroup | Refused:
    """Reads a sealed group from its protobuf message, unopened: checks only the form of key, signature and codec.

    Args:
        message: a message of bounded size, from anywhere.
        claimed: digest that the sender gave, checked by `open_group`; None: the digest is computed from the body.
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
    """Serialises a sealed group, for disk or transfer."""
    return sealed_to_message(sealed).SerializeToString(deterministic=True)


def sealed_from_bytes(data: bytes) -> SealedGroup | Refused:
    """Inverse of `sealed_to_bytes` for bytes of bounded length; the group is not opened (see `open_group`)."""
    try:
        message = rollout_pb2.SealedGroup.FromString(data)
    except DecodeError:
        return Refused(reason=RefusalReason.MALFORMED, detail=f"{len(data)} bytes that are no SealedGroup")
    return sealed_from_message(message)
