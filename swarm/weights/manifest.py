"""Weights manifest: the tensors and chunks of a version, signed by the lineage's owner and verified before any chunk.

Invariant: a `Manifest` from `open_manifest` has consistent counts and sizes within the caller's limits, which bound
all that is allocated for it later.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from swarm.identity import Identity, node_id_of, verify
from swarm.types import Canary, Digest, NodeId, PolicyVersion, SealedManifest, short
from swarm.weights.codec import Codec, full_bytes
from swarm.weights.payload import MalformedPayload, StreamReader, Unusable, UnusableReason, malformed, num_chunks
from swarm.weights.tensors import MAX_DIMS, MAX_NAME_BYTES, TensorSpec

DOMAIN_WEIGHTS: Final = b"swarm.v1.weights"
MAX_CANARIES: Final = 16
MAX_CANARY_TOKENS: Final = 512
MAX_POLICY_ID_BYTES: Final = 128
_MAGIC: Final = b"SWM2"
_MAGIC_WITHOUT_BRANCH: Final = b"SWM1"  # of release 0.1.0, and of unsigned bodies
_DIGEST_BYTES: Final = 32
_CODECS: Final = (Codec.FULL, Codec.DELTA, Codec.LORA)  # index is the number on the wire
_U8, _U16, _U32, _U64 = (struct.Struct(f"<{kind}") for kind in "BHIQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A receiver's bounds on sizes, checked before memory of that size is allocated."""

    manifest_bytes: int = 4 << 20  # as in swarm.wire.weights: enough for a full version of 120 GiB
    payload_bytes: int = 1 << 40
    weights_bytes: int = 1 << 40
    tensors: int = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One payload: a version in full, or as a patch of one other version."""

    version: PolicyVersion  # with swarm.model.version_digest of the tensors
    base: PolicyVersion | None  # None: the payload is the full version
    codec: Codec
    layout: Digest  # of names, dtypes and shapes, see `layout_digest`
    tensors: tuple[TensorSpec, ...]  # in order of name; empty for a patch, whose layout is its base's
    hashes: tuple[Digest, ...]  # BLAKE3 of each tensor's bytes, in order of name
    payload_bytes: int
    chunks: tuple[Digest, ...]  # SHA-256 of each 1 MiB of the payload
    canaries: tuple[Canary, ...] = ()
    branch: int = 0  # grows with each start or rewind of the owner; a branch has one version per step; 0: unknown


def layout_digest(specs: tuple[TensorSpec, ...]) -> Digest:
    """SHA-256 over count, names, dtypes and shapes, in order of name."""
    return hashlib.sha256(b"swarm layout 1\0" + _pack_specs(specs)).digest()


def seal_manifest(manifest: Manifest, identity: Identity) -> SealedManifest:
    """Serialises and signs a manifest of our own lineage."""
    return seal_body(manifest_body(manifest), identity)


def with_branch(body: bytes, branch: int) -> bytes:
    """Adds a branch (> 0) to a serialised manifest without one."""
    assert body[:4] == _MAGIC_WITHOUT_BRANCH and branch > 0, (body[:4], branch)
    return _MAGIC + _U64.pack(branch) + body[4:]


def seal_body(body: bytes, identity: Identity) -> SealedManifest:
    """Signs a serialised manifest of our own lineage."""
    return SealedManifest(body=body, public_key=identity.public_key, signature=identity.sign(DOMAIN_WEIGHTS, body))


def open_manifest(sealed: SealedManifest, owner: NodeId, limits: Limits) -> Manifest | Unusable:
    """Opens an untrusted manifest: checks body size, signer, signature, then structure, sizes and lineage.

    Args:
        owner: node that should have signed the manifest, as the owner of the lineage.
        limits: bounds of this node.

    Returns:
        The manifest; Unusable with the reason if a check fails.
    """
    try:
        if len(sealed.body) > limits.manifest_bytes:
            raise _too_large("manifest bytes", len(sealed.body), limits.manifest_bytes)
        if node_id_of(sealed.public_key) != owner:
            raise MalformedPayload(UnusableReason.WRONG_OWNER, f"signed by {short(node_id_of(sealed.public_key))}")
        if not verify(sealed.public_key, DOMAIN_WEIGHTS, sealed.body, sealed.signature):
            raise MalformedPayload(UnusableReason.WRONG_SIGNATURE, f"of {short(owner)}")
        manifest = _unpack(sealed.body, limits)
        if manifest.version.policy_id != owner:
            raise MalformedPayload(
                UnusableReason.WRONG_OWNER, f"a version of lineage {short(manifest.version.policy_id)}"
            )
        return manifest
    except MalformedPayload as error:
        return error.unusable()


def _too_large(what: str, size: int, bound: int) -> MalformedPayload:
    return MalformedPayload(UnusableReason.TOO_LARGE, f"{what}: {size} exceeds {bound}")


# --- writing -----------------------------------------------------------------------------------


def manifest_body(manifest: Manifest) -> bytes:
    """The serialised manifest, to be signed by the process that has the key."""
    assert len(manifest.chunks) == num_chunks(manifest.payload_bytes)
    head = _MAGIC + _U64.pack(manifest.branch) if manifest.branch else _MAGIC_WITHOUT_BRANCH
    parts = [head, _U8.pack(_CODECS.index(manifest.codec)), _pack_version(manifest.version)]
    parts += [_U8.pack(manifest.base is not None), b"" if manifest.base is None else _pack_version(manifest.base)]
    parts += [manifest.layout, _pack_specs(manifest.tensors), _U32.pack(len(manifest.hashes)), *manifest.hashes]
    parts += [_U64.pack(manifest.payload_bytes), *manifest.chunks, _U16.pack(len(manifest.canaries))]
    for canary in manifest.canaries:
        assert canary.token_ids.shape == canary.logprobs.shape
        parts += [_U16.pack(len(canary.token_ids)), canary.token_ids.astype("<i4").tobytes()]
        parts.append(canary.logprobs.astype("<f4").tobytes())
    return b"".join(parts)


def _pack_text(text: str) -> bytes:
    encoded = text.encode()
    return _U16.pack(len(encoded)) + encoded


def _pack_version(version: PolicyVersion) -> bytes:
    assert len(version.digest) == _DIGEST_BYTES, version
    return _pack_text(version.policy_id) + _U64.pack(version.step) + version.digest


def _pack_specs(specs: tuple[TensorSpec, ...]) -> bytes:
    parts = [_U32.pack(len(specs))]
    for spec in specs:
        shape = struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape)
        parts += [_pack_text(spec.name), _pack_text(spec.dtype), shape]
    return b"".join(parts)


# --- reading -----------------------------------------------------------------------------------


def _unpack(body: bytes, limits: Limits) -> Manifest:
    reader = StreamReader([body])
    magic, branch = reader.take(len(_MAGIC)), 0
    if magic == _MAGIC:
        (branch,) = reader.numbers(_U64)
        if not 0 < branch < 1 << 53:
            raise malformed(f"branch {branch}")
    elif magic != _MAGIC_WITHOUT_BRANCH:
        raise malformed("not a manifest of format SWM1 or SWM2")
    codec = _read_codec(reader)
    version = _read_version(reader)
    base = _read_version(reader) if _read_flag(reader) else None
    layout = reader.take(_DIGEST_BYTES)
    tensors = _read_specs(reader, limits)
    hashes = _read_digests(reader, reader.numbers(_U32)[0], limits.tensors)
    (payload_bytes,) = reader.numbers(_U64)
    if payload_bytes > limits.payload_bytes:
        raise _too_large("payload bytes", payload_bytes, limits.payload_bytes)
    chunks = _read_digests(reader, num_chunks(payload_bytes), limits.manifest_bytes // _DIGEST_BYTES)
    canaries = tuple(_read_canary(reader) for _ in range(_bounded(reader.numbers(_U16)[0], MAX_CANARIES, "canaries")))
    reader.end()
    manifest = Manifest(
        version=version,
        base=base,
        codec=codec,
        layout=layout,
        tensors=tensors,
        hashes=hashes,
        payload_bytes=payload_bytes,
        chunks=chunks,
        canaries=canaries,
        branch=branch,
    )
    _check_consistent(manifest)
    return manifest


def _check_consistent(manifest: Manifest) -> None:
    """Raises MalformedPayload if fields contradict each other."""
    base = manifest.base
    if (manifest.codec is Codec.FULL and base is not None) or (manifest.codec is Codec.DELTA and base is None):
        raise malformed(f"codec {manifest.codec} {'without' if base is None else 'with'} a base")
    if base is not None:
        if manifest.tensors:
            raise malformed("a patch has the layout of its base")
        if base.policy_id != manifest.version.policy_id or base.step == manifest.version.step:
            raise malformed(f"a patch of {short(base.policy_id)}/{base.step} to step {manifest.version.step}")
        return
    if len(manifest.tensors) != len(manifest.hashes):
        raise malformed(f"{len(manifest.hashes)} hashes of {len(manifest.tensors)} tensors")
    if layout_digest(manifest.tensors) != manifest.layout:
        raise malformed("layout digest is not that of the tensors")
    if manifest.payload_bytes != full_bytes(manifest.tensors):
        raise malformed(f"{manifest.payload_bytes} bytes are not the {full_bytes(manifest.tensors)} of these tensors")


def _bounded(count: int, bound: int, what: str) -> int:
    if count > bound:
        raise _too_large(what, count, bound)
    return count


def _read_codec(reader: StreamReader) -> Codec:
    (number,) = reader.numbers(_U8)
    if number >= len(_CODECS):
        raise malformed(f"codec {number} is unknown")
    return _CODECS[number]


def _read_flag(reader: StreamReader) -> bool:
    (flag,) = reader.numbers(_U8)
    if flag > 1:
        raise malformed(f"flag {flag}")
    return bool(flag)


def _read_text(reader: StreamReader, max_bytes: int) -> str:
    encoded = reader.take(_bounded(reader.numbers(_U16)[0], max_bytes, "text bytes"))
    if not encoded.isascii():
        raise malformed("text is not ASCII")
    return encoded.decode("ascii")


def _read_version(reader: StreamReader) -> PolicyVersion:
    policy_id = _read_text(reader, MAX_POLICY_ID_BYTES)
    (step,) = reader.numbers(_U64)
    if not policy_id.isprintable() or step >= 1 << 53:
        raise malformed("policy version out of bounds")
    return PolicyVersion(policy_id=policy_id, step=step, digest=reader.take(_DIGEST_BYTES))


def _read_digests(reader: StreamReader, count: int, bound: int) -> tuple[Digest, ...]:
    return tuple(reader.take(_DIGEST_BYTES) for _ in range(_bounded(count, bound, "digests")))


def _read_specs(reader: StreamReader, limits: Limits) -> tuple[TensorSpec, ...]:
    count = _bounded(reader.numbers(_U32)[0], limits.tensors, "tensors")
    specs: list[TensorSpec] = []
    for _ in range(count):
        name, dtype = _read_text(reader, MAX_NAME_BYTES), _read_text(reader, 32)
        num_dims = _bounded(reader.numbers(_U8)[0], MAX_DIMS, "dimensions")
        shape = reader.numbers(struct.Struct(f"<{num_dims}Q"))
        try:
            specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))
        except ValueError as error:
            raise malformed(str(error)) from None
    names = [spec.name for spec in specs]
    if names != sorted(set(names)):
        raise malformed("tensor names are not ascending")
    total = sum(spec.num_bytes for spec in specs)
    if total > limits.weights_bytes:
        raise _too_large("weights bytes", total, limits.weights_bytes)
    return tuple(specs)


def _read_canary(reader: StreamReader) -> Canary:
    count = _bounded(reader.numbers(_U16)[0], MAX_CANARY_TOKENS, "canary tokens")
    token_ids = np.frombuffer(reader.take(4 * count), "<i4").astype(np.int32)
    logprobs = np.frombuffer(reader.take(4 * count), "<f4").astype(np.float32)
    if np.any(token_ids < 0) or np.any(logprobs > 0):
        raise malformed("canary with a negative token id or a positive log-probability")
    return Canary(token_ids=token_ids, logprobs=logprobs)
