"""From a version to a manifest with its chunks, and from those back to a verified copy.

Invariant: `stage` gives either every tensor of exactly the version that the manifest names, or a reason; the base and
whatever an engine runs on are not touched by it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from swarm.types import PolicyVersion, short
from swarm.weights.chunks import checked, chunk_digest, chunked
from swarm.weights.codec import Codec, decode, encode, is_adapter
from swarm.weights.full import full_bytes
from swarm.weights.manifest import Canary, Manifest, layout_digest
from swarm.weights.refuse import Malformed, Unusable, UnusableReason
from swarm.weights.tensors import HostTensor, Weights, published_digest, specs_of

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

    A patch that grows past `delta_at_most` of the full size is given up, and the version is published in full; then
    chunks of the patch that were handed on belong to no manifest.

    Args:
        base: what the payload should start from; None publishes in full.
        put: takes digest and content of each chunk, in order.
    """
    specs = specs_of(target.weights)
    if base is not None and specs_of(base.weights) == specs and base.version.policy_id == target.version.policy_id:
        codec = Codec.LORA if is_adapter(specs) else Codec.DELTA
        budget = int(delta_at_most * full_bytes(specs))
        chunks = _put_all(encode(codec, target.weights, base.weights), put, budget)
        if chunks is not None:
            return _manifest(target, base, codec, chunks, canaries)
    codec = Codec.LORA if is_adapter(specs) else Codec.FULL
    chunks = _put_all(encode(codec, target.weights, None), put, full_bytes(specs))
    assert chunks is not None
    return _manifest(target, None, codec, chunks, canaries)


@dataclass(frozen=True, slots=True)
class _Chunks:
    digests: tuple[bytes, ...]
    num_bytes: int


def _put_all(
    parts: Iterable[bytes | memoryview], put: Callable[[bytes, bytes], None], max_bytes: int
) -> _Chunks | None:
    """None as soon as the payload exceeds `max_bytes`."""
    digests: list[bytes] = []
    num_bytes = 0
    for chunk in chunked(parts):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            return None
        digests.append(chunk_digest(chunk))
        put(digests[-1], chunk)
    return _Chunks(tuple(digests), num_bytes)


def _manifest(target: Held, base: Held | None, codec: Codec, chunks: _Chunks, canaries: tuple[Canary, ...]) -> Manifest:
    specs = specs_of(target.weights)
    return Manifest(
        version=target.version,
        base=base.version if base else None,
        codec=codec,
        layout=layout_digest(specs),
        tensors=() if base else specs,
        hashes=tuple(target.weights[spec.name].blake3() for spec in specs),
        payload_bytes=chunks.num_bytes,
        chunks=chunks.digests,
        canaries=canaries,
    )


def stage(manifest: Manifest, chunks: Iterable[bytes | memoryview], base: Held | None) -> Held | Unusable:
    """A verified copy of the manifest's version.

    Checked in this order: base and its layout before anything is decoded, each chunk before it is read, each tensor
    when it is decoded, the whole at the end.

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
    hashes = {spec.name: digest for spec, digest in zip(specs, manifest.hashes, strict=True)}
    staged: dict[str, HostTensor] = {}
    payload = checked(chunks, manifest.chunks, manifest.payload_bytes)
    for tensor in decode(specs, payload, start):
        if tensor.blake3() != hashes[tensor.spec.name]:
            raise Malformed(UnusableReason.WRONG_TENSOR, tensor.spec.name)
        staged[tensor.spec.name] = tensor
    held = Held.of({name: staged[name] for name in sorted(staged)}, manifest.version)
    if isinstance(held, Unusable):
        raise Malformed(held.reason, held.detail)
    return held


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
