"""Simpler ways to write the same change, and the entropy floor: what the codec is compared with.

Invariant: every rival is lossless and vectorised, and is given the places that changed for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import zstandard

from swarm.weights.tensors import Bits, TorchWeights
from swarm.weights.ulp_delta import ulp_deltas

Array = np.ndarray[Any, np.dtype[Any]]
ZSTD_LEVEL: Final = 1
ESCAPE: Final = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What changed in one tensor."""

    num_elements: int
    at: Array  # int64 [n], ascending
    old: Bits  # [n]
    new: Bits  # [n]
    steps: Bits  # [n], see `swarm.weights.ulp_delta`


def changes_between(base: TorchWeights, target: TorchWeights) -> list[Change]:
    """One for each tensor, in order of name."""
    changes: list[Change] = []
    for spec in target.specs:
        old, new = base[spec.name].bits, target[spec.name].bits
        at = np.flatnonzero(old != new)
        changes.append(
            Change(
                num_elements=spec.num_elements,
                at=at,
                old=old[at],
                new=new[at],
                steps=ulp_deltas(old[at], new[at], spec.info),
            )
        )
    return changes


def full(change: Change, base: Bits, target: Bits) -> bytes:
    """The whole tensor, compressed."""
    return _zstd(target.tobytes())


def pairs(change: Change, base: Bits, target: Bits) -> bytes:
    """int32 places and bf16 values."""
    return _zstd(change.at.astype(np.int32).tobytes()) + _zstd(change.new.tobytes())


def pairs_plain(change: Change, base: Bits, target: Bits) -> bytes:
    """The same without zstd, as most published systems send it."""
    return change.at.astype(np.int32).tobytes() + change.new.tobytes()


def overwrite(change: Change, base: Bits, target: Bits) -> bytes:
    """Gaps and new values."""
    return _gaps(change) + _planes(change.new)


def xor(change: Change, base: Bits, target: Bits) -> bytes:
    """Gaps and old XOR new."""
    return _gaps(change) + _planes(change.old ^ change.new)


def ulp_steps(change: Change, base: Bits, target: Bits) -> bytes:
    """Gaps and steps between neighbouring values."""
    return _gaps(change) + _planes(change.steps)


RIVALS: Final[dict[str, Callable[[Change, Bits, Bits], bytes]]] = {
    "full + zstd": full,
    "int32 + bf16 pairs": pairs_plain,
    "pairs + zstd": pairs,
    "gaps + overwrite": overwrite,
    "gaps + XOR": xor,
    "gaps + ulp steps": ulp_steps,
}


@dataclass(slots=True)
class Floors:
    """Entropies summed over tensors, bits."""

    num_elements: int = 0
    num_changed: int = 0
    steps: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, change: Change) -> None:
        """One more tensor."""
        self.num_elements += change.num_elements
        self.num_changed += len(change.at)
        for value, count in zip(*np.unique(change.steps, return_counts=True), strict=True):
            self.steps[int(value)] = self.steps.get(int(value), 0) + int(count)

    @property
    def iid_bytes(self) -> float:
        """Of independent places at one density and independent steps from their own histogram."""
        places = entropy_bits([self.num_changed, self.num_elements - self.num_changed])
        return (places + entropy_bits(list(self.steps.values()))) / 8


def entropy_bits(counts: list[int]) -> float:
    """Total bits of a sequence with those counts."""
    known = np.array([count for count in counts if count], np.float64)
    return float((known * np.log2(known.sum() / known)).sum())


def _gaps(change: Change) -> bytes:
    """uint8 gaps, 255 for one that is in the second stream."""
    gaps = np.diff(change.at, prepend=-1) - 1
    return _zstd(np.minimum(gaps, ESCAPE).astype(np.uint8).tobytes()) + _zstd(
        gaps[gaps >= ESCAPE].astype(np.uint32).tobytes()
    )


def _planes(values: Bits) -> bytes:
    """Byte planes, each compressed."""
    planes = values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return b"".join(_zstd(planes[:, place].tobytes()) for place in range(values.dtype.itemsize))


def _zstd(data: bytes) -> bytes:
    return zstandard.compress(data, ZSTD_LEVEL) if data else b""
