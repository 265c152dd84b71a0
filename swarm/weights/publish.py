"""From a version to a manifest with its chunks, and from those back to a verified copy.

Invariant: `stage` gives either every tensor of exactly the version that the manifest names, or a reason; the base and
whatever an engine runs on are not touched by it.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from swarm.types import Digest, PolicyVersion, short
from swarm.weights.check import verified
from swarm.weights.chunks import checked, chunk_digest, chunked
from swarm.weights.codec import Codec, decode, encode, is_adapter
from swarm.weights.delta import encode_delta, sample_changes
from swarm.weights.full import full_bytes
from swarm.weights.manifest import Canary, Manifest, layout_digest
from swarm.weights.refuse import Malformed, Unusable, UnusableReason
from swarm.weights.tensors import TensorSpec, Weights, published_digest, specs_of

DELTA_AT_MOST: Final = 0.5  # share of the full size from which a patch is not worth its decoding


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A version whose weights were verified; they must not change while it is held."""

    version: PolicyVersion  # with digest
    weights: Weights

    @classmethod
    def of(cls, weights: Weights, version: PolicyVersion) -> "Held | Unusable":
        """Weights from anywhere, after their digest was compared with the version's."""
        digest = published_digest(weights)
        if digest != version.digest:
            detail = f"weights are {short(digest)}, version {version.step} is {short(version.digest)}"
            return Unusable(reason=UnusableReason.WRONG_TARGET, detail=detail)
        return cls(version=version, weights=weights)


def publish(
    target: Held,
    base: Held | None,
    put: Callable[[bytes, bytes], None],
    canaries: tuple[Canary, ...] = (),
    delta_at_most: float = DELTA_AT_MOST,
) -> Manifest:
    """Encodes a version, hands its chunks on, and describes them.

    A version is published in full where a patch would exceed `delta_at_most` of the full size, by a sample or when it
    is made. So a patch is held in memory until it is complete, and nothing of one that is given up is handed on.

    Args:
        base: what the payload should start from; None publishes in full.
        put: takes digest and content of each chunk, in order.
    """
    specs = specs_of(target.weights)
    with ThreadPoolExecutor(1, "weights-hash") as beside:  # costs no time where a second core is free
        hashes = beside.submit(_hashes, target.weights, specs)
        patch = _patch(target, base, delta_at_most)
        start = None if patch is None else base
        codec = Codec.LORA if is_adapter(specs) else Codec.FULL if start is None else Codec.DELTA
        chunks = _put_all(patch if patch is not None else chunked(encode(codec, target.weights, None)), put)
        return Manifest(
            version=target.version,
            base=start.version if start else None,
            codec=codec,
            layout=layout_digest(specs),
            tensors=() if start else specs,
            hashes=hashes.result(),
            payload_bytes=chunks.num_bytes,
            chunks=chunks.digests,
            canaries=canaries,
        )


def _hashes(weights: Weights, specs: tuple[TensorSpec, ...]) -> tuple[Digest, ...]:
    return tuple(weights[spec.name].blake3() for spec in specs)


def _patch(target: Held, base: Held | None, at_most: float) -> list[bytes] | None:
    """Its chunks; None where there can be no patch, or it exceeds a share of the full size."""
    specs = specs_of(target.weights)
    if base is None or specs_of(base.weights) != specs or base.version.policy_id != target.version.policy_id:
        return None
    max_bytes = int(at_most * full_bytes(specs))
    sampled = sample_changes(base.weights, target.weights)
    if sampled.num_bytes > max_bytes:
        return None
    chunks: list[bytes] = []
    num_bytes = 0
    for chunk in chunked(encode_delta(base.weights, target.weights, sampled)):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            return None
        chunks.append(chunk)
    return chunks


@dataclass(frozen=True, slots=True)
class _Chunks:
    digests: tuple[Digest, ...]
    num_bytes: int


def _put_all(chunks: Iterable[bytes], put: Callable[[Digest, bytes], None]) -> _Chunks:
    digests: list[Digest] = []
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk)
        digests.append(chunk_digest(chunk))
        put(digests[-1], chunk)
    return _Chunks(tuple(digests), num_bytes)


def stage(manifest: Manifest, chunks: Iterable[bytes | memoryview], base: Held | None) -> Held | Unusable:
    """A verified copy of the manifest's version.

    Checked in this order: base and its layout before anything is decoded, each chunk before it is read, each tensor
    after it was decoded, the whole at the end.

    Args:
        manifest: from `open_manifest`.
        chunks: its payload, in order, from anywhere; asked for one at a time.
        base: what this node holds; not used for a payload that is complete in itself.
    """
    try:
        return _stage(manifest, chunks, base)
    except Malformed as error:
        return error.unusable()


def _stage(manifest: Manifest, chunks: Iterable[bytes | memoryview], base: Held | None) -> Held:
    start = _checked_base(manifest, base)
    specs = specs_of(start) if start is not None else manifest.tensors
    if layout_digest(specs) != manifest.layout or len(specs) != len(manifest.hashes):
        raise Malformed(UnusableReason.WRONG_LAYOUT, "names, dtypes or shapes are not those of the manifest")
    hashes = dict(zip(specs, manifest.hashes, strict=True))
    payload = checked(chunks, manifest.chunks, manifest.payload_bytes)
    weights = verified(decode(specs, payload, start), hashes, manifest.version.digest)
    return Held(version=manifest.version, weights=weights)


def _checked_base(manifest: Manifest, base: Held | None) -> Weights | None:
    if manifest.base is None:
        return None
    held = None if base is None else base.version
    if held != manifest.base:
        what = "nothing" if held is None else f"step {held.step}, {short(held.digest)}"
        wanted = f"step {manifest.base.step}, {short(manifest.base.digest)}"
        raise Malformed(UnusableReason.WRONG_BASE, f"holding {what}; the patch starts from {wanted}")
    assert base is not None
    return base.weights
