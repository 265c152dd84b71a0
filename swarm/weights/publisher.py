"""Turns each new version of a trainer into ways to it: patches from what generators hold, and anchors in full.

Invariant: a body that `publish` returns names only chunks that were handed on before.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from swarm.types import Canary, Digest, FloatArray, PolicyVersion
from swarm.weights.full import full_bytes
from swarm.weights.manifest import manifest_body
from swarm.weights.publish import DELTA_AT_MOST, Held, publish
from swarm.weights.tensors import TensorSpec, Weights

Score = Callable[[Sequence[Sequence[int]]], list[FloatArray]]
Put = Callable[[Digest, bytes], None]

ANCHOR_EVERY: Final = 10  # versions
CANARY_TOKENS: Final = 64


def least_store_bytes(specs: Sequence[TensorSpec]) -> int:
    """The budget in which there is always room for a way from nothing to the newest version: an anchor and a patch."""
    return math.ceil((1 + DELTA_AT_MOST) * full_bytes(specs))


def is_anchor(step: int, every: int = ANCHOR_EVERY) -> bool:
    """True for a version that is also published in full."""
    return step % every == 0


class Publisher:
    """The publishing side of one lineage. Holds the version before and the newest anchor in memory to patch from.

    Args:
        put: takes each chunk (digest, content); blocking.
        canary_ids: token ids of the texts whose log-probs go into each manifest.
        score: the log-probs of those by the weights that are being published; see `Generator.score`.
        anchor_every: versions between two that are published in full.

    Example:
        publisher = Publisher(store.put_chunk, canary_ids, evaluator.score)
        bodies = publisher.publish(version, TorchWeights(tensors))
    """

    def __init__(
        self,
        put: Put,
        canary_ids: Sequence[Sequence[int]] = (),
        score: Score | None = None,
        anchor_every: int = ANCHOR_EVERY,
    ) -> None:
        assert not canary_ids or score is not None
        self._put = put
        self._canary_ids = [list(ids[:CANARY_TOKENS]) for ids in canary_ids]
        self._score = score
        self._anchor_every = anchor_every
        self._newest: Held | None = None
        self._anchor: Held | None = None

    def publish(self, version: PolicyVersion, weights: Weights) -> list[bytes]:
        """Encodes a version and hands its chunks on (blocking).

        Args:
            version: with the digest of `weights`.
            weights: its published tensors, which never change afterwards.

        Returns:
            Unsigned manifest bodies, best way first; empty where this version was published last.

        Raises:
            StorageFull: from `put`; nothing of this version is published, a later one patches from what was before.
        """
        if self._newest is not None and self._newest.version == version:
            return []
        target = Held(version=version, weights=weights)
        canaries = self._canaries()
        bodies: list[bytes] = []
        for base in self._bases(version):
            manifest = publish(target, base, self._put, canaries)
            bodies.append(manifest_body(manifest))
            if manifest.base is None:  # as planned, or since so much changed: another patch is not worth it either
                self._anchor = target
                break
        self._newest = target
        return bodies

    def _bases(self, version: PolicyVersion) -> list[Held | None]:
        """What ways to this version start from, None for nothing: the version before it, the newest anchor."""
        if self._newest is None or self._newest.version.step >= version.step:
            return [None]  # the first since the start, or a step back
        bases: list[Held | None] = [self._newest]
        if self._anchor is not self._newest:
            bases.append(self._anchor)
        return [*bases, None] if is_anchor(version.step, self._anchor_every) else bases

    def _canaries(self) -> tuple[Canary, ...]:
        if self._score is None or not self._canary_ids:
            return ()
        return tuple(
            Canary(token_ids=np.asarray(ids, np.int32), logprobs=logprobs)
            for ids, logprobs in zip(self._canary_ids, self._score(self._canary_ids), strict=True)
        )
