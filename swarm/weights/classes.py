"""Which exponents share a class of places or a context of values: chosen from a sample of what changed.

Invariant: the choice changes only the size of a patch, never what it decodes to.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.members import ClassTable, class_table
from swarm.weights.steps import magnitudes, steps
from swarm.weights.tensors import Bits, DtypeInfo

MAX_CLASSES: Final = 5  # of places; each large one costs about 0.15 ns a weight on both sides, eight save 1 %
MAX_CONTEXTS: Final = 24  # of values
_CLASS_COST_BITS: Final = 800.0  # tables and lengths of its streams
_NUM_SIZES: Final = 65  # bit lengths of a step


@dataclass(frozen=True, slots=True)
class Tables:
    """How a patch classifies the weights of a dtype by the magnitude they have in the base."""

    info: DtypeInfo
    place_thresholds: tuple[int, ...]  # where classes begin, ascending magnitudes without mantissa bits
    value_thresholds: tuple[int, ...]  # where contexts begin
    places: ClassTable = field(init=False)  # [exponents]
    values: ClassTable = field(init=False)  # [exponents]

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", class_table(self.info, self.place_thresholds))
        object.__setattr__(self, "values", class_table(self.info, self.value_thresholds))


@dataclass(slots=True)
class _Class:
    first: int  # lowest exponent
    members: float
    sizes: NDArray[np.float64]  # changed members by bit length of their step

    def joined(self, other: "_Class") -> "_Class":
        return _Class(self.first, self.members + other.members, self.sizes + other.sizes)


def _place_bits(one: _Class) -> float:
    """Entropy of who changed."""
    changed = float(one.sizes.sum())
    return _entropy(np.array([changed, max(0.0, one.members - changed)]))


def _value_bits(one: _Class) -> float:
    """Entropy of how large changes are."""
    return _entropy(one.sizes)


def _entropy(counts: NDArray[np.float64]) -> float:
    """Total bits of a sequence with those counts."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def choose_tables(samples: Iterable[tuple[Bits, Bits]], info: DtypeInfo, scale: float) -> Tables:
    """Tables with which a patch should be small.

    Args:
        samples: base and target patterns of the same weights.
        scale: weights in all for each one sampled.
    """
    if info.mantissa_bits is None:
        return Tables(info, (), ())
    exponents = _classes_by_exponent(samples, info, scale)
    places = _joined(exponents, _place_bits, MAX_CLASSES)
    values = _joined([one for one in exponents if one.sizes.any()], _value_bits, MAX_CONTEXTS)
    shift = info.mantissa_bits
    return Tables(
        info, tuple(one.first << shift for one in places[1:]), tuple(one.first << shift for one in values[1:])
    )


def _joined(classes: list[_Class], bits: Callable[[_Class], float], most: int) -> list[_Class]:
    """Joins neighbours as long as that costs little, or there are too many."""
    classes = list(classes)

    def loss(place: int) -> float:
        one, other = classes[place], classes[place + 1]
        return bits(one.joined(other)) - bits(one) - bits(other)

    losses = [loss(place) for place in range(len(classes) - 1)]
    while losses:
        place = losses.index(min(losses))
        if losses[place] > _CLASS_COST_BITS and len(classes) <= most:
            break
        classes[place : place + 2] = [classes[place].joined(classes[place + 1])]
        del losses[place]
        for changed in (place - 1, place):
            if 0 <= changed < len(losses):
                losses[changed] = loss(changed)
    return classes


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
