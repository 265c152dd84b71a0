"""Publishing: encodes each new version as patches of the previous version and the newest anchor, and some in full.

Invariant: `put` gets every chunk of a manifest body before `Publisher.publish` returns the body.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from swarm.types import Canary, Digest, FloatArray, PolicyVersion
from swarm.weights.apply import VerifiedVersion
from swarm.weights.codec import Codec, encode, full_bytes, is_adapter
from swarm.weights.delta import encode_delta, sample_changes
from swarm.weights.manifest import Manifest, layout_digest, manifest_body
from swarm.weights.payload import chunk_digest, split_chunks
from swarm.weights.store import WeightStore
from swarm.weights.tensors import TensorSpec, Weights, specs_of

logger = logging.getLogger(__name__)

Score = Callable[[Sequence[Sequence[int]]], list[FloatArray]]
Put = Callable[[Digest, bytes], None]

DELTA_AT_MOST: Final = 0.5  # of the full size; a larger patch is not worth decoding
CANARY_TOKENS: Final = 64  # of each canary text
ANCHOR_EVERY: Final = 10  # versions


def is_anchor(step: int, every: int = ANCHOR_EVERY) -> bool:
    """True if a version of this step is an anchor, also published in full."""
    return step % every == 0


def least_store_bytes(specs: Sequence[TensorSpec]) -> int:
    """Smallest disk budget for a chain from nothing to the newest version: an anchor and a patch."""
    return math.ceil((1 + DELTA_AT_MOST) * full_bytes(specs))


@dataclass(eq=False, repr=False)
class Publisher:
    """Publisher of a lineage; keeps the previous version and the newest anchor in memory as bases of patches."""

    _put: Put  # takes digest and content of each chunk, in order; blocking
    canary_ids: Sequence[Sequence[int]] = ()  # token ids of texts whose log-probs go into each manifest
    _score: Score | None = None  # log-probs of `canary_ids` under the weights being published; see `Generator.score`
    anchor_every: int = ANCHOR_EVERY  # versions from one anchor to the next
    _newest: VerifiedVersion | None = field(default=None, init=False)
    _anchor: VerifiedVersion | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert not self.canary_ids or self._score is not None
        self._canary_ids = [list(ids[:CANARY_TOKENS]) for ids in self.canary_ids]

    def publish(self, version: PolicyVersion, weights: Weights) -> list[bytes]:
        """Encodes a version and hands its chunks to `put` (blocking).

        Args:
            weights: tensors of the version, with its digest; never changed afterwards.

        Returns:
            Unsigned manifest bodies: patches, then the full version if due; empty if `version` was published last.

        Raises:
            StorageFull: from `put`; nothing is published.
        """
        if self._newest is not None and self._newest.version == version:
            return []
        target = VerifiedVersion(version=version, weights=weights)
        canaries = self._canaries()
        bodies: list[bytes] = []
        for base in self._bases(version):
            manifest = publish(target, base, self._put, canaries)
            bodies.append(manifest_body(manifest))
            if manifest.base is None:  # as planned, or no patch was small enough: then the next patch is not, either
                self._anchor = target
                break
        self._newest = target
        return bodies

    def _bases(self, version: PolicyVersion) -> list[VerifiedVersion | None]:
        """Bases of the version's payloads, in order of publication; None for a full copy."""
        if self._newest is None or self._newest.version.step >= version.step:
            return [None]  # the first since the start, or after a rewind
        bases: list[VerifiedVersion | None] = [self._newest]
        if self._anchor is not self._newest:
            bases.append(self._anchor)
        return [*bases, None] if is_anchor(version.step, self.anchor_every) else bases

    def _canaries(self) -> tuple[Canary, ...]:
        if self._score is None or not self._canary_ids:
            return ()
        return tuple(
            Canary(token_ids=np.asarray(ids, np.int32), logprobs=logprobs)
            for ids, logprobs in zip(self._canary_ids, self._score(self._canary_ids), strict=True)
        )


# --- one payload -------------------------------------------------------------------------------


def publish(
    target: VerifiedVersion,
    base: VerifiedVersion | None,
    put: Put,
    canaries: tuple[Canary, ...] = (),
    delta_at_most: float = DELTA_AT_MOST,
) -> Manifest:
    """Encodes a version, hands its chunks to `put`, and returns its manifest.

    A patch over `delta_at_most` of the full size, by estimate or when encoded, is replaced by a full copy. So a patch
    is kept in memory until it is complete, and no chunk of a dropped patch reaches `put`.

    Args:
        base: start of a patch; None, or a base of another layout or lineage, gives a full copy.
    """
    specs = specs_of(target.weights)
    with ThreadPoolExecutor(1, "weights-hash") as second:  # hashing costs no time where a second core is free
        hashes = second.submit(lambda: tuple(target.weights[spec.name].blake3() for spec in specs))
        patch = _encode_patch(target, base, delta_at_most)
        start = None if patch is None else base
        codec = Codec.LORA if is_adapter(specs) else Codec.FULL if start is None else Codec.DELTA
        digests, payload_bytes = _put_all(
            split_chunks(encode(codec, target.weights, None)) if patch is None else patch, put
        )
        return Manifest(
            version=target.version,
            base=start.version if start else None,
            codec=codec,
            layout=layout_digest(specs),
            tensors=() if start else specs,
            hashes=hashes.result(),
            payload_bytes=payload_bytes,
            chunks=digests,
            canaries=canaries,
        )


def _encode_patch(target: VerifiedVersion, base: VerifiedVersion | None, at_most: float) -> list[bytes] | None:
    """Chunks of a patch; None if layouts or lineages differ, or the patch exceeds the share `at_most` of full size."""
    specs = specs_of(target.weights)
    if base is None or specs_of(base.weights) != specs or base.version.policy_id != target.version.policy_id:
        return None
    max_bytes = int(at_most * full_bytes(specs))
    sampled = sample_changes(base.weights, target.weights)
    if sampled.num_bytes > max_bytes:
        return None
    chunks: list[bytes] = []
    num_bytes = 0
    for chunk in split_chunks(encode_delta(base.weights, target.weights, sampled)):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            return None
        chunks.append(chunk)
    return chunks


def _put_all(chunks: Iterable[bytes], put: Put) -> tuple[tuple[Digest, ...], int]:
    """Hands each chunk to `put`; returns the digests of the chunks, and their total bytes."""
    digests: list[Digest] = []
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk)
        digests.append(chunk_digest(chunk))
        put(digests[-1], chunk)
    return tuple(digests), num_bytes


# --- full copies -------------------------------------------------------------------------------


def keep_anchor(store: WeightStore, held: VerifiedVersion) -> None:
    """Writes the missing chunks of a version's full copy, if the full copy's manifest is in the store (blocking).

    So a node that took the version by patches can restart from nothing, and serve joiners, without fetching. Nothing is
    written unless twice the copy's size is free, since the next versions need the room more. A disk error is logged.
    """
    try:
        for manifest, _ in store.manifests(held.version.policy_id):
            if manifest.base is None and manifest.version == held.version:
                _fill(store, manifest, held)
    except OSError as error:
        logger.error(
            "a full copy of the weights could not be written", extra={"step": held.version.step, "error": str(error)}
        )


def _fill(store: WeightStore, manifest: Manifest, held: VerifiedVersion) -> None:
    missing = set(store.missing(manifest.chunks))
    if not missing or store.free_bytes < 2 * manifest.payload_bytes:
        return
    for chunk in split_chunks(encode(manifest.codec, held.weights, None)):
        digest = chunk_digest(chunk)
        if digest in missing:
            store.put_chunk(digest, chunk)
