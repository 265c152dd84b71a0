"""Verified copies of a version: from a manifest and its chunks to tensors that are exactly what was signed.

Invariant: `stage` gives either every tensor of exactly the version that the manifest names, or a reason; the base and
whatever an engine runs on are not touched. Each tensor and all of them together are compared with the manifest.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from swarm.types import Digest, PolicyVersion, short
from swarm.weights.chunks import check_chunks
from swarm.weights.codec import decode
from swarm.weights.manifest import Manifest, layout_digest
from swarm.weights.tensors import HostTensor, PublishedDigest, TensorSpec, Weights, published_digest, specs_of
from swarm.weights.unusable import MalformedPayload, Unusable, UnusableReason


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedVersion:
    """A version whose weights were verified; they must not change while it is held."""

    version: PolicyVersion  # with digest
    weights: Weights

    @classmethod
    def of(cls, weights: Weights, version: PolicyVersion) -> "VerifiedVersion | Unusable":
        """Weights from anywhere, once their digest was found to be the version's."""
        digest = published_digest(weights)
        if digest != version.digest:
            detail = f"weights are {short(digest)}, version {version.step} is {short(version.digest)}"
            return Unusable(reason=UnusableReason.WRONG_TARGET, detail=detail)
        return cls(version=version, weights=weights)


def stage(
    manifest: Manifest, chunks: Iterable[bytes | memoryview], base: VerifiedVersion | None
) -> VerifiedVersion | Unusable:
    """Decodes and verifies the version that a manifest names.

    Order of checks: base and layout before anything is decoded, each chunk before it is read, each tensor after it was
    decoded, the whole version at the end.

    Args:
        manifest: from `open_manifest`.
        chunks: its payload, in order, from anywhere; taken one at a time.
        base: what this node holds; not used where the payload is a full version.
    """
    try:
        return _stage(manifest, chunks, base)
    except MalformedPayload as error:
        return error.unusable()


def _stage(manifest: Manifest, chunks: Iterable[bytes | memoryview], base: VerifiedVersion | None) -> VerifiedVersion:
    start = _check_base(manifest, base)
    specs = specs_of(start) if start is not None else manifest.tensors
    if layout_digest(specs) != manifest.layout or len(specs) != len(manifest.hashes):
        raise MalformedPayload(UnusableReason.WRONG_LAYOUT, "names, dtypes or shapes are not those of the manifest")
    hashes = dict(zip(specs, manifest.hashes, strict=True))
    payload = check_chunks(chunks, manifest.chunks, manifest.payload_bytes)
    weights = verify_tensors(decode(specs, payload, start), hashes, manifest.version.digest)
    return VerifiedVersion(version=manifest.version, weights=weights)


def _check_base(manifest: Manifest, base: VerifiedVersion | None) -> Weights | None:
    """The weights that the payload starts from, None for a full version. Raises MalformedPayload (WRONG_BASE)."""
    if manifest.base is None:
        return None
    held = None if base is None else base.version
    if held != manifest.base:
        what = "nothing" if held is None else f"step {held.step}, {short(held.digest)}"
        wanted = f"step {manifest.base.step}, {short(manifest.base.digest)}"
        raise MalformedPayload(UnusableReason.WRONG_BASE, f"holding {what}; the patch starts from {wanted}")
    assert base is not None
    return base.weights


def verify_tensors(tensors: Iterable[HostTensor], hashes: Mapping[TensorSpec, Digest], digest: Digest) -> Weights:
    """Collects decoded tensors, once each of them and all together have the expected hashes.

    Hashing runs in a second thread and releases the interpreter lock, so it costs no time where a core is free.
    Decoding may be some tensors ahead; a wrong one ends it.

    Args:
        tensors: as they are decoded, in any order.
        hashes: expected BLAKE3 of each tensor, in order of name.
        digest: expected SHA-256 of all of them together, see `PublishedDigest`.

    Raises:
        MalformedPayload: a tensor or the whole has another hash; or whatever `tensors` raises.
    """
    staged: dict[str, HostTensor] = {}
    check = _TensorHashes(hashes)
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "weights-check") as beside:
        for tensor in tensors:
            while pending and pending[0].done():
                pending.popleft().result()
            pending.append(beside.submit(check.add, tensor))
            staged[tensor.spec.name] = tensor
        for future in pending:
            future.result()
    decoded = check.digest()
    if decoded != digest:
        raise MalformedPayload(
            UnusableReason.WRONG_TARGET, f"weights are {short(decoded)}, the version is {short(digest)}"
        )
    return {spec.name: staged[spec.name] for spec in hashes}


class _TensorHashes:
    """Compares tensor by tensor; holds those back that the digest of the whole, in order of name, has not reached."""

    def __init__(self, hashes: Mapping[TensorSpec, Digest]) -> None:
        self._hashes = hashes
        self._left = deque(hashes)
        self._early: dict[TensorSpec, HostTensor] = {}
        self._digest = PublishedDigest()

    def add(self, tensor: HostTensor) -> None:
        if tensor.blake3() != self._hashes[tensor.spec]:
            raise MalformedPayload(UnusableReason.WRONG_TENSOR, tensor.spec.name)
        self._early[tensor.spec] = tensor
        while self._left and self._left[0] in self._early:
            self._digest.update(self._early.pop(self._left.popleft()))

    def digest(self) -> Digest:
        assert not self._left, "a decoder gave fewer tensors than there are"
        return self._digest.digest()
