"""Weight updates of an engine: verifies a patch chain, then loads the new version, all or nothing.

Invariant: the engine only gets weights whose digest is that of the announced version. `stage` gives either every tensor
of exactly the manifest's version or a reason, and never changes its base. `Applier.version` is what the engine serves.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace

from swarm.errors import ConfigError, Unavailable, WeightsRefused
from swarm.identity import node_id_of
from swarm.interfaces import Generator
from swarm.types import ApplyReport, Digest, PatchChain, PolicyVersion, short
from swarm.weights.codec import decode
from swarm.weights.manifest import Limits, Manifest, layout_digest, open_manifest
from swarm.weights.payload import MalformedPayload, Unusable, UnusableReason, check_chunks
from swarm.weights.tensors import HostTensor, PublishedDigest, TensorSpec, Weights, published_digest, specs_of, to_torch

logger = logging.getLogger(__name__)

Chunk = Callable[[Digest], bytes | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedVersion:
    """A version with verified weights, which must never change afterwards."""

    version: PolicyVersion  # with digest
    weights: Weights

    @classmethod
    def of(cls, weights: Weights, version: PolicyVersion) -> "VerifiedVersion | Unusable":
        """The verified version if `weights` have the digest of `version`, else Unusable (WRONG_TARGET)."""
        digest = published_digest(weights)
        if digest != version.digest:
            detail = f"weights are {short(digest)}, version {version.step} is {short(version.digest)}"
            return Unusable(reason=UnusableReason.WRONG_TARGET, detail=detail)
        return cls(version=version, weights=weights)


def stage(
    manifest: Manifest, chunks: Iterable[bytes | memoryview], base: VerifiedVersion | None
) -> VerifiedVersion | Unusable:
    """Decodes and verifies the version of a manifest; returns an Unusable if the payload fails a check.

    Order of checks: base and layout before decoding, each chunk before decoding reads it, each tensor after decoding,
    the whole version at the end.

    Args:
        manifest: from `open_manifest`.
        chunks: payload in order, from anywhere; taken one at a time.
        base: held version; unused for a full payload.
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
    """Base weights of the payload, None for a full version. Raises MalformedPayload (WRONG_BASE)."""
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
    """Collects decoded tensors; checks the hash of each tensor and the digest of all tensors.

    A second thread hashes without the interpreter lock, so hashing costs no time if a core is free. Decoding may run
    some tensors ahead of hashing, and stops once a wrong hash is found.

    Args:
        tensors: in any order, as they are decoded.
        hashes: expected BLAKE3 of each tensor, in order of name.
        digest: expected SHA-256 of all, see `PublishedDigest`.

    Raises:
        MalformedPayload: a hash or the digest differs, or a number is not finite. Errors of `tensors` propagate.
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
    """Checks each tensor's hash; holds tensors decoded early, since the digest of all takes them in order of name."""

    def __init__(self, hashes: Mapping[TensorSpec, Digest]) -> None:
        self._hashes = hashes
        self._left = deque(hashes)
        self._early: dict[TensorSpec, HostTensor] = {}
        self._digest = PublishedDigest()

    def add(self, tensor: HostTensor) -> None:
        if tensor.blake3() != self._hashes[tensor.spec]:
            raise MalformedPayload(UnusableReason.WRONG_TENSOR, tensor.spec.name)
        if not tensor.is_finite:
            raise MalformedPayload(UnusableReason.NOT_FINITE, tensor.spec.name)
        self._early[tensor.spec] = tensor
        while self._left and self._left[0] in self._early:
            self._digest.update(self._early.pop(self._left.popleft()))

    def digest(self) -> Digest:
        assert not self._left, "a decoder gave fewer tensors than there are"
        return self._digest.digest()


@dataclass(frozen=True, slots=True)
class _Staged:
    held: VerifiedVersion
    manifest: Manifest  # of the last patch
    num_bytes: int  # manifests and payloads


@dataclass(eq=False, repr=False)
class Applier:
    """Applies patch chains to one engine that follows a lineage."""

    _engine: Generator  # loads verified weights; it may refuse a version
    _held: VerifiedVersion  # weights in the engine; at first its policy id is not compared
    _chunk: Chunk  # reads a chunk from the node's weight store; None where it is missing
    _: KW_ONLY
    limits: Limits = field(default_factory=Limits)
    in_flight: bool = False  # unfinished sequences continue with the new weights
    keep: Callable[[VerifiedVersion], None] = lambda held: None  # takes loaded weights (blocking); raises nothing

    @property
    def version(self) -> PolicyVersion:
        """The version that the engine serves."""
        return self._held.version

    def target(self, chain: PatchChain) -> PolicyVersion:
        """The target of a chain; the current version if the chain's last manifest cannot be opened."""
        manifest = open_manifest(chain[-1], node_id_of(chain[-1].public_key), self.limits)
        return self.version if isinstance(manifest, Unusable) else manifest.version

    def apply(self, chain: PatchChain) -> ApplyReport:
        """Verifies the patches of a chain and loads the last version into the engine (blocking).

        Args:
            chain: from `LocalExchange.next_update`; starts at the current version, or at nothing.

        Returns:
            A report; if it has an error, the engine still serves the previous version.
        """
        try:
            return self._apply(chain)
        except (WeightsRefused, ConfigError, Unavailable) as error:
            return ApplyReport(version=self.target(chain), error=str(error))
        except Exception as error:  # out of memory, a device error, hostile weights: generation continues
            target = self.target(chain)
            logger.exception("could not load new weights; the old version serves on", extra={"step": target.step})
            return ApplyReport(version=target, error=f"{type(error).__name__}: {error}")

    def _apply(self, chain: PatchChain) -> ApplyReport:
        began_s = time.monotonic()
        staged = self._stage(chain)
        staged_s = time.monotonic()
        if isinstance(staged, Unusable):
            return ApplyReport(version=self.target(chain), error=f"{staged.reason}: {staged.detail}", is_unusable=True)
        version = staged.held.version
        tensors = {name: to_torch(tensor) for name, tensor in staged.held.weights.items()}
        loaded = self._engine.load(version, tensors, canaries=staged.manifest.canaries, in_flight=self.in_flight)
        seconds = {"stage": staged_s - began_s, "load": time.monotonic() - staged_s, "pause": loaded.pause_s}
        is_new, self._held = staged.held.weights is not self._held.weights, staged.held
        if is_new:
            self.keep(staged.held)
        return ApplyReport(
            version=version, num_bytes=staged.num_bytes, seconds=seconds, mismatch_nats=loaded.mismatch_nats
        )

    def _stage(self, chain: PatchChain) -> "_Staged | Unusable":
        """Decodes and verifies the patches one after another, without touching the engine."""
        held, manifest, num_bytes = self._held, None, 0
        for sealed in chain:
            manifest = open_manifest(sealed, node_id_of(sealed.public_key), self.limits)
            if isinstance(manifest, Unusable):
                return manifest
            num_bytes += len(sealed.body) + manifest.payload_bytes
            if manifest.version.digest == held.version.digest:
                held, num_bytes = replace(held, version=manifest.version), num_bytes - manifest.payload_bytes
                continue
            if manifest.base is not None and manifest.base.digest == held.version.digest:
                held = replace(held, version=manifest.base)  # equal weights under another name
            staged = stage(manifest, self._chunks(manifest), held)
            if isinstance(staged, Unusable):
                return staged
            held = staged
        assert manifest is not None and not isinstance(manifest, Unusable), "a chain has at least one patch"
        return _Staged(held, manifest, num_bytes)

    def _chunks(self, manifest: Manifest) -> Iterator[bytes]:
        for digest in manifest.chunks:
            chunk = self._chunk(digest)
            if chunk is None:
                return  # `stage` names the missing one
            yield chunk
