"""Exponent classes: weights of similar magnitude change about as often, so a patch codes them together.

An optimizer step is large relative to the ulp of a small weight, so small weights change often and large ones rarely.
Changed positions coded class by class take a fraction of the bytes of positions coded over all weights.
`choose_classes` cuts the exponents into classes, `ClassOrder` sorts the weights of a piece by class.

Invariant: the order depends only on the base's bits, which both sides hold, so a patch does not store it. The choice of
classes changes the size of a patch, never its decoded weights.

The classes of small weights hold few weights and are stored as lists of positions. Each class of large weights is a
bitmap, 64 weights per word, with rank and select, so an unchanged weight takes one bit of memory per bitmap.
Source of rank and select by broadword arithmetic: Vigna, "Broadword implementation of rank/select queries", 2008.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.tensors import Bits, DtypeInfo
from swarm.weights.ulp_delta import magnitudes, ulp_deltas

Words = NDArray[np.uint64]  # 64 weights each, lowest bit first
Positions = NDArray[np.int64]
Flags = NDArray[np.bool_]
ClassTable = NDArray[np.uint8]  # [exponents] class of each

MAX_CLASSES: Final = 10  # sixteen save 0.1 % and take 5 % longer
LISTED_SHARE: Final = 1 / 48  # largest share of all weights that the listed classes hold together
_CLASS_BITS: Final = 800.0  # bits that a class must save: the headers and lengths of its streams
_PASS_SHARE: Final = 0.01  # share of a patch that a mapped class must save to pay for a pass over all weights
_NUM_SIZES: Final = 65  # bit lengths of an ulp delta


@dataclass(frozen=True, slots=True)
class ExponentClasses:
    """Classes of a dtype's weights by magnitude in the base; class c is [thresholds[c - 1], thresholds[c])."""

    info: DtypeInfo
    thresholds: tuple[int, ...]  # ascending magnitudes without mantissa bits; empty: one class for all weights
    count: int = field(init=False)
    table: ClassTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.thresholds) + 1)
        object.__setattr__(self, "table", _table(self.info, self.thresholds))

    def class_of(self, magnitude: Bits) -> NDArray[np.uint8]:
        """[n] class of each of the magnitudes [n]."""
        if self.info.mantissa_bits is None:
            return np.zeros(len(magnitude), np.uint8)
        return self.table[magnitude >> magnitude.dtype.type(self.info.mantissa_bits)]


def _table(info: DtypeInfo, thresholds: tuple[int, ...]) -> ClassTable:
    if info.mantissa_bits is None:
        return np.zeros(1, np.uint8)
    exponents = np.arange(_num_exponents(info, info.mantissa_bits))
    limits = [threshold >> info.mantissa_bits for threshold in thresholds]
    return np.searchsorted(limits, exponents, side="right").astype(np.uint8)


def _num_exponents(info: DtypeInfo, mantissa_bits: int) -> int:
    return 1 << (8 * info.size - 1 - mantissa_bits)


def choose_classes(base: Bits, target: Bits, info: DtypeInfo, scale: float) -> tuple[ExponentClasses, float]:
    """The classes that should make a patch smallest, and the estimated bits of that patch.

    Args:
        base, target: [n] bit patterns of a sample of the weights.
        scale: number of all weights divided by the number of sampled weights.
    """
    merged = _merge_neighbours(_count_by_exponent(base, target, info, scale))
    thresholds = (
        tuple(each.first << info.mantissa_bits for each in merged[1:]) if info.mantissa_bits is not None else ()
    )
    return ExponentClasses(info, thresholds), sum(_cost_bits(each) for each in merged)


@dataclass(slots=True)
class _Class:
    first: int  # lowest exponent
    num_weights: float
    sizes: NDArray[np.float64]  # [65], changed weights by bit length of their ulp delta

    def merge(self, other: "_Class") -> "_Class":
        return _Class(self.first, self.num_weights + other.num_weights, self.sizes + other.sizes)


def _cost_bits(each: _Class) -> float:
    """Estimated bits of a class: entropy of positions and delta lengths, and all bits below a delta's highest one."""
    changed = float(each.sizes.sum())
    which = _entropy(np.array([changed, max(0.0, each.num_weights - changed)]))
    return which + _entropy(each.sizes) + float((each.sizes * _LOW_BITS).sum())


_LOW_BITS: Final = np.maximum(np.arange(_NUM_SIZES) - 1.0, 0.0)


def _entropy(counts: NDArray[np.float64]) -> float:
    """Total bits of a sequence with these symbol counts."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def _merge_neighbours(classes: list[_Class]) -> list[_Class]:
    """Merges adjacent classes while a boundary saves fewer bits than it costs, or more than MAX_CLASSES remain."""
    classes = list(classes)
    pass_bits = _PASS_SHARE * sum(_cost_bits(each) for each in classes)
    listed = LISTED_SHARE * sum(each.num_weights for each in classes)
    below = np.cumsum([each.num_weights for each in classes])
    price_bits = {
        each.first: _CLASS_BITS if num_below <= listed else max(_CLASS_BITS, pass_bits)
        for each, num_below in zip(classes[1:], below, strict=False)
    }

    def gain_bits(index: int) -> float:
        lower, upper = classes[index], classes[index + 1]
        return _cost_bits(lower.merge(upper)) - _cost_bits(lower) - _cost_bits(upper) - price_bits[upper.first]

    gains = [gain_bits(index) for index in range(len(classes) - 1)]
    while gains:
        index = gains.index(min(gains))
        if gains[index] > 0 and len(classes) <= MAX_CLASSES:
            break
        classes[index : index + 2] = [classes[index].merge(classes[index + 1])]
        del gains[index]
        for neighbour in (index - 1, index):
            if 0 <= neighbour < len(gains):
                gains[neighbour] = gain_bits(neighbour)
    return classes


def _count_by_exponent(base: Bits, target: Bits, info: DtypeInfo, scale: float) -> list[_Class]:
    """One class for each exponent that occurs."""
    if info.mantissa_bits is None:
        exponents, num_exponents = np.zeros(len(base), np.intp), 1
    else:
        magnitude = magnitudes(base, info, np.empty_like(base))
        exponents = (magnitude >> magnitude.dtype.type(info.mantissa_bits)).astype(np.intp)
        num_exponents = _num_exponents(info, info.mantissa_bits)
    num_weights = np.bincount(exponents, minlength=num_exponents)
    changed = np.flatnonzero(base != target)
    lengths = _bit_lengths(ulp_deltas(base[changed], target[changed], info))
    pairs = np.bincount(exponents[changed] * _NUM_SIZES + lengths, minlength=num_exponents * _NUM_SIZES)
    sizes = scale * pairs.reshape(num_exponents, _NUM_SIZES)
    return [_Class(int(e), scale * float(num_weights[e]), sizes[e]) for e in np.flatnonzero(num_weights)]


def _bit_lengths(numbers: Bits) -> NDArray[np.intp]:
    """0 for 0, else 1 + floor(log2 n); rounding moves some large numbers up by one, which is harmless."""
    return np.ceil(np.log2(numbers.astype(np.float64) + 1.0)).astype(np.intp)


# --- order by class ----------------------------------------------------------------------------


_ONES: Final = np.uint64(0x0101010101010101)
_HIGH: Final = np.uint64(0x8080808080808080)
_BYTE: Final = np.uint64(0xFF)


def _select_table() -> NDArray[np.uint8]:
    """[256 * 8] position of set bit number r of byte b, at index 8 b + r."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        positions = [position for position in range(8) if byte >> position & 1]
        table[byte, : len(positions)] = positions
    return table.reshape(-1)


_SELECT: Final = _select_table()


def positions_of(mask: Flags) -> Positions:
    """Positions of True in a mask, ascending."""
    return _positions_in(_pack_words(mask))


def _positions_in(words: Words) -> Positions:
    """Positions of set bits, ascending; skips empty words, then empty bytes, since most bits are 0."""
    some = np.flatnonzero(words != 0)
    in_words = words[some].view(np.uint8)
    some_bytes = np.flatnonzero(in_words != 0)
    bits = np.flatnonzero(np.unpackbits(in_words[some_bytes], bitorder="little").view(np.bool_))
    starts = (some << 6)[some_bytes >> 3]
    starts += (some_bytes & 7) << 3
    positions = starts[bits >> 3]
    positions += bits & 7
    return positions


class Scratch:
    """Reused buffers: page faults of fresh memory would cost more than the writes."""

    def __init__(self, info: DtypeInfo) -> None:
        self._magnitude = np.empty(0, info.bits_dtype)
        self._mask = np.empty(0, np.bool_)

    def magnitude(self, count: int) -> Bits:
        """[count] unsigned integers of any content, valid until the next call."""
        if len(self._magnitude) < count:
            self._magnitude = np.empty(count, self._magnitude.dtype)
        return self._magnitude[:count]

    def mask(self, count: int) -> Flags:
        """[count] truth values of any content, valid until the next call."""
        if len(self._mask) < count:
            self._mask = np.empty(count, np.bool_)
        return self._mask[:count]


class ClassOrder:
    """The weights of a piece sorted by class, then position. The index of a weight in that order is its rank.

    Example: eight weights, class 0 (small, s) and class 1 (large, L); those at positions 3, 5 and 7 changed (*).

        position   0  1  2  3* 4  5* 6  7*
        class      s  L  L  s  L  L  L  s

        rank       0  1* 2* | 3  4  5  6* 7        starts = [0, 3, 8]
        position   0  3  7  | 1  2  4  5  6

    The changed ranks are 1, 2 and 6. A patch stores gaps, the unchanged weights before each changed one in its class:
    1 and 0 in class 0; 3 in class 1. Small weights change most, so their gaps are small numbers.
    """

    def __init__(self, base: Bits, classes: ExponentClasses, scratch: Scratch) -> None:
        """Sorts one non-empty piece of the base; overwrites the buffers of `scratch`."""
        self._classes = classes
        magnitude = magnitudes(base, classes.info, scratch.magnitude(len(base))) if classes.thresholds else base
        below = scratch.mask(len(base))
        # From the largest magnitudes down, each class is a bitmap, until the rest is small enough to be listed.
        words, mapped = _all_words(len(base)), list[Words]()
        listed: Positions = _NONE
        for threshold in reversed(classes.thresholds):
            np.less(magnitude, magnitude.dtype.type(threshold), out=below)
            outer, words = words, _pack_words(below)
            mapped.append(outer ^ words)
            if int(np.bitwise_count(words).sum()) <= LISTED_SHARE * len(base):
                listed = _positions_in(words)
                break
        else:
            mapped.append(words)
        self._num_words = len(words)
        self._words = np.concatenate(mapped[::-1])
        ends = np.bitwise_count(self._words).astype(np.int64)  # numpy sums wide integers six times as fast
        ends[0] += len(listed)
        self._ends = np.cumsum(ends, out=ends)
        self._first_mapped = classes.count - len(mapped)
        class_of = classes.class_of(magnitude[listed])
        self._listed = listed[np.argsort(class_of, kind="stable")]
        counts = np.bincount(class_of, minlength=self._first_mapped)[: self._first_mapped]
        self._first_words = (np.arange(classes.count) - self._first_mapped) * self._num_words
        mapped_ends = self._ends[self._num_words - 1 :: self._num_words]
        # Rank of the first weight of each class, and the number of weights at the end.
        self.starts: list[int] = [0, *np.cumsum(counts).tolist(), *mapped_ends.tolist()]

    def ranks(self, positions: Positions, old: Bits, is_changed: Flags) -> tuple[Positions, Positions, Flags]:
        """The ranks of changed weights.

        Args:
            positions: [n] of changed weights, ascending.
            old: [n] their bit patterns in the base.
            is_changed: flag of every weight of the piece, True at `positions`.

        Returns:
            Indices into `positions` in order of rank [n], their ascending ranks [n], and the flags of the listed
            weights in order of rank.
        """
        class_of = self._classes.class_of(magnitudes(old, self._classes.info, np.empty_like(old)))
        order = np.argsort(class_of, kind="stable")
        flags = is_changed[self._listed]
        listed = np.flatnonzero(flags)
        if len(listed) == len(positions):
            return order, listed, flags
        mapped = order[len(listed) :]
        positions = positions[mapped]
        word_of = self._first_words[class_of[mapped]]
        word_of += positions >> 6
        ranks = self._ends[word_of]
        ranks -= np.bitwise_count(self._words[word_of] >> (positions & 63).view(np.uint64))
        return order, np.concatenate([listed, ranks]) if len(listed) else ranks, flags

    def positions(self, ranks: Positions) -> Positions:
        """Positions of ascending ranks, all below the number of weights."""
        num_listed = int(np.searchsorted(ranks, len(self._listed)))
        listed, mapped = self._listed[ranks[:num_listed]], ranks[num_listed:]
        if not len(mapped):
            return listed
        positions = self._select(mapped) if len(mapped) <= len(self._words) else self._select_from_all(mapped)
        return np.concatenate([listed, positions]) if num_listed else positions

    def _select_from_all(self, ranks: Positions) -> Positions:
        """`_select` by a list of all mapped weights: faster if at least about one weight per word changed."""
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little").view(np.bool_)
        return np.flatnonzero(bits)[ranks - len(self._listed)] % (64 * self._num_words)

    def _select(self, ranks: Positions) -> Positions:
        """The position of each rank: find its word, then its byte by broadword arithmetic, then the bit by table."""
        word_of = np.searchsorted(self._ends, ranks, side="right")
        words = self._words[word_of]
        inside = (ranks - self._ends[word_of] + np.bitwise_count(words)).view(np.uint64)
        # Byte k of `sums` counts the set bits of bytes 0 to k.
        sums = np.bitwise_count(words.view(np.uint8)).view(np.uint64) * _ONES
        shift = np.bitwise_count((((inside * _ONES) | _HIGH) - sums) & _HIGH).astype(np.uint64) << np.uint64(3)
        before = ((sums << np.uint64(8)) >> shift) & _BYTE
        byte = (words >> shift) & _BYTE
        bit = _SELECT[(byte << np.uint64(3)) + inside - before]
        class_ends = np.searchsorted(ranks, self.starts[self._first_mapped :])
        first_words = np.repeat(self._first_words[self._first_mapped :], np.diff(class_ends))
        return ((word_of - first_words) << 6) + shift.view(np.int64) + bit


_NONE: Final[Positions] = np.zeros(0, np.int64)


def _all_words(count: int) -> Words:
    words = np.full(-(-count // 64), ~np.uint64(0))
    if count % 64:
        words[-1] = np.uint64((1 << count % 64) - 1)
    return words


def _pack_words(mask: Flags) -> Words:
    bits = np.packbits(mask, bitorder="little")
    if len(bits) % 8:
        bits = np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)])
    return bits.view(np.uint64)
