"""Which exponents share a class: thresholds that a patch names, chosen from a sample of what changed.

Invariant: thresholds change only the size of a patch, never what it decodes to.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.steps import magnitudes, steps
from swarm.weights.tensors import Bits, DtypeInfo

MAX_CLASSES: Final = 6  # each costs 0.1 ns a weight on both sides; ten would be 2-3 % smaller
_CLASS_COST_BITS: Final = 800.0  # tables and lengths of its streams
_NUM_SIZES: Final = 65  # bit lengths of a step


@dataclass(slots=True)
class _Class:
    first: int  # lowest exponent
    members: float
    sizes: NDArray[np.float64]  # changed members by bit length of their step

    def joined(self, other: "_Class") -> "_Class":
        return _Class(self.first, self.members + other.members, self.sizes + other.sizes)

    @property
    def bits(self) -> float:
        """Entropy of who changed, and of the size of the change."""
        changed = float(self.sizes.sum())
        return _entropy(np.array([changed, max(0.0, self.members - changed)])) + _entropy(self.sizes)


def _entropy(counts: NDArray[np.float64]) -> float:
    """Total bits of a sequence with those counts."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def choose_thresholds(samples: Iterable[tuple[Bits, Bits]], info: DtypeInfo, scale: float) -> tuple[int, ...]:
    """Magnitudes at which classes begin, ascending; none for what is no floating-point number.

    Args:
        samples: base and target patterns of the same weights.
        scale: weights in all for each one sampled.
    """
    if info.mantissa_bits is None:
        return ()
    classes = _classes_by_exponent(samples, info, scale)
    losses = [_loss(*pair) for pair in pairwise(classes)]
    while losses:
        place = losses.index(min(losses))
        if losses[place] > _CLASS_COST_BITS and len(classes) <= MAX_CLASSES:
            break
        classes[place : place + 2] = [classes[place].joined(classes[place + 1])]
        del losses[place]
        for changed in (place - 1, place):
            if 0 <= changed < len(losses):
                losses[changed] = _loss(classes[changed], classes[changed + 1])
    return tuple(one.first << info.mantissa_bits for one in classes[1:])


def _loss(one: _Class, other: _Class) -> float:
    return one.joined(other).bits - one.bits - other.bits


def _classes_by_exponent(samples: Iterable[tuple[Bits, Bits]], info: DtypeInfo, scale: float) -> list[_Class]:
    """One class for each exponent, as far as exponents were seen."""
    assert info.mantissa_bits is not None
    num_exponents = 1 << (8 * info.size - 1 - info.mantissa_bits)
    members = np.zeros(num_exponents)
    sizes = np.zeros((num_exponents, _NUM_SIZES))
    for base, target in samples:
        exponents = _exponents(base, info)
        members += np.bincount(exponents, minlength=num_exponents)
        changed = np.flatnonzero(base != target)
        length = _bit_lengths(steps(base[changed], target[changed], info))
        np.add.at(sizes, (exponents[changed], length), 1.0)
    seen = np.flatnonzero(members)
    return [_Class(int(e), scale * float(members[e]), scale * sizes[e]) for e in seen]


def _exponents(bits: Bits, info: DtypeInfo) -> NDArray[np.intp]:
    keys = magnitudes(bits, info, np.empty_like(bits))
    return (keys >> bits.dtype.type(info.mantissa_bits or 0)).astype(np.intp)


def _bit_lengths(numbers: Bits) -> NDArray[np.intp]:
    """0 for 0, else 1 + floor(log2 n); rounding of large numbers moves some into the next one, which is harmless."""
    return np.ceil(np.log2(numbers.astype(np.float64) + 1.0)).astype(np.intp)


def low_bits_of(num_members: int, num_changed: int) -> int:
    """How many low bits of a gap travel as they are, so that the rest averages between 32 and 64."""
    return max(0, math.floor(math.log2(num_members / num_changed)) - 5)
