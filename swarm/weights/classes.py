"""Which exponents share a class of weights: chosen from a sample of what changed.

Invariant: the choice changes only the size of a patch, never what it decodes to.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.steps import magnitudes, steps
from swarm.weights.tensors import Bits, DtypeInfo

ClassTable = NDArray[np.uint8]  # [exponents] class of each

MAX_CLASSES: Final = 10  # sixteen save 0.1 % and take 5 % longer
LISTED_SHARE: Final = 1 / 48  # classes that hold together at most this share of all weights are cheap: see `members`
_CLASS_BITS: Final = 800.0  # that a class must save: headers and lengths of its streams
_PASS_SHARE: Final = 0.01  # of a patch that a class among many weights must save: a pass over all weights
_NUM_SIZES: Final = 65  # bit lengths of a step


@dataclass(frozen=True, slots=True)
class Classes:
    """How a patch classifies the weights of a dtype by the magnitude they have in the base.

    Class c holds magnitudes from threshold c - 1 to below threshold c.
    """

    info: DtypeInfo
    thresholds: tuple[int, ...]  # ascending magnitudes without mantissa bits; none makes one class of everything
    count: int = field(init=False)
    table: ClassTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.thresholds) + 1)
        object.__setattr__(self, "table", _table(self.info, self.thresholds))

    def of(self, keys: Bits) -> NDArray[np.uint8]:
        """[n] class of each magnitude."""
        if self.info.mantissa_bits is None:
            return np.zeros(len(keys), np.uint8)
        return self.table[keys >> keys.dtype.type(self.info.mantissa_bits)]


def _table(info: DtypeInfo, thresholds: tuple[int, ...]) -> ClassTable:
    if info.mantissa_bits is None:
        return np.zeros(1, np.uint8)
    exponents = np.arange(_num_exponents(info, info.mantissa_bits))
    limits = [threshold >> info.mantissa_bits for threshold in thresholds]
    return np.searchsorted(limits, exponents, side="right").astype(np.uint8)


def _num_exponents(info: DtypeInfo, mantissa_bits: int) -> int:
    return 1 << (8 * info.size - 1 - mantissa_bits)


def choose_classes(base: Bits, target: Bits, info: DtypeInfo, scale: float) -> tuple[Classes, float]:
    """Classes with which a patch should be small, and about how many bits it then takes.

    Args:
        base, target: [n] patterns of the same weights, a sample.
        scale: weights in all for each one sampled.
    """
    exponents = _statistics(base, target, info, scale)
    joined = _joined(exponents)
    thresholds = tuple(one.first << info.mantissa_bits for one in joined[1:]) if info.mantissa_bits is not None else ()
    return Classes(info, thresholds), sum(_bits(one) for one in joined)


@dataclass(slots=True)
class _Class:
    first: int  # lowest exponent
    members: float
    sizes: NDArray[np.float64]  # changed members by bit length of their step

    def joined(self, other: "_Class") -> "_Class":
        return _Class(self.first, self.members + other.members, self.sizes + other.sizes)


def _bits(one: _Class) -> float:
    """Entropy of who changed, and by how much (the bits below the highest one of a step count as random)."""
    changed = float(one.sizes.sum())
    who = _entropy(np.array([changed, max(0.0, one.members - changed)]))
    return who + _entropy(one.sizes) + float((one.sizes * _LOW_BITS).sum())


_LOW_BITS: Final = np.maximum(np.arange(_NUM_SIZES) - 1.0, 0.0)


def _entropy(counts: NDArray[np.float64]) -> float:
    """Total bits of a sequence with those counts."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def _joined(classes: list[_Class]) -> list[_Class]:
    """Joins neighbours as long as keeping them apart gains less than it costs, or there are too many."""
    classes = list(classes)
    a_pass = _PASS_SHARE * sum(_bits(one) for one in classes)
    listed = LISTED_SHARE * sum(one.members for one in classes)
    below = np.cumsum([one.members for one in classes])
    price = {
        one.first: _CLASS_BITS if before <= listed else max(_CLASS_BITS, a_pass)
        for one, before in zip(classes[1:], below, strict=False)
    }

    def gain(place: int) -> float:
        one, other = classes[place], classes[place + 1]
        return _bits(one.joined(other)) - _bits(one) - _bits(other) - price[other.first]

    gains = [gain(place) for place in range(len(classes) - 1)]
    while gains:
        place = gains.index(min(gains))
        if gains[place] > 0 and len(classes) <= MAX_CLASSES:
            break
        classes[place : place + 2] = [classes[place].joined(classes[place + 1])]
        del gains[place]
        for changed in (place - 1, place):
            if 0 <= changed < len(gains):
                gains[changed] = gain(changed)
    return classes


def _statistics(base: Bits, target: Bits, info: DtypeInfo, scale: float) -> list[_Class]:
    """One class for each exponent that was seen."""
    if info.mantissa_bits is None:
        exponents, num_exponents = np.zeros(len(base), np.intp), 1
    else:
        keys = magnitudes(base, info, np.empty_like(base))
        exponents = (keys >> keys.dtype.type(info.mantissa_bits)).astype(np.intp)
        num_exponents = _num_exponents(info, info.mantissa_bits)
    members = np.bincount(exponents, minlength=num_exponents)
    changed = np.flatnonzero(base != target)
    lengths = _bit_lengths(steps(base[changed], target[changed], info))
    pairs = np.bincount(exponents[changed] * _NUM_SIZES + lengths, minlength=num_exponents * _NUM_SIZES)
    sizes = scale * pairs.reshape(num_exponents, _NUM_SIZES)
    return [_Class(int(e), scale * float(members[e]), sizes[e]) for e in np.flatnonzero(members)]


def _bit_lengths(numbers: Bits) -> NDArray[np.intp]:
    """0 for 0, else 1 + floor(log2 n); rounding of large numbers moves some into the next one, which is harmless."""
    return np.ceil(np.log2(numbers.astype(np.float64) + 1.0)).astype(np.intp)
