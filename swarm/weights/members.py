"""Where the weights of a class are: rank and select over bitmaps of 64 weights a word.

Invariant: both sides of a patch hold the base, so a class is a function of the base's bits and costs no byte. A weight
changes about as often as an optimizer step is large against its ulp, which its exponent tells: coding places among
weights of like exponents takes a fraction of what coding them among all weights takes.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.steps import magnitudes
from swarm.weights.tensors import Bits, DtypeInfo

Words = NDArray[np.uint64]
Places = NDArray[np.int64]
ClassTable = NDArray[np.uint8]  # [exponents] class of each

_ONES: Final = np.uint64(0x0101010101010101)
_HIGH: Final = np.uint64(0x8080808080808080)
_BYTE: Final = np.uint64(0xFF)
_LIST_FROM: Final = 32  # a look-up takes about 32 times as long as listing one member
_LIST_BELOW: Final = 64  # classes that hold together at most 1/64 of a piece are listed


def _select_table() -> NDArray[np.uint8]:
    """[256 * 8] place of the set bit number r of a byte b, at 8 b + r."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        places = [place for place in range(8) if byte >> place & 1]
        table[byte, : len(places)] = places
    return table.reshape(-1)


_SELECT: Final = _select_table()


def places_of(mask: NDArray[np.bool_]) -> Places:
    """Where a mask is True; two to three times as quick as numpy's own search where that is rare."""
    packed = np.packbits(mask, bitorder="little")
    some = np.flatnonzero(packed != 0)
    found = np.flatnonzero(np.unpackbits(packed[some], bitorder="little").view(np.bool_))
    return (some << 3)[found >> 3] + (found & 7)


class Mapped:
    """The members of one class among the weights of a piece, as a bitmap."""

    def __init__(self, words: Words) -> None:
        """`words`: bit i of word w is set where weight 64 w + i belongs to the class."""
        self._words = words
        self._ends = np.cumsum(np.bitwise_count(words), dtype=np.int64)
        self.count = int(self._ends[-1]) if len(words) else 0

    def ranks(self, places: Places, is_changed: NDArray[np.bool_]) -> Places:
        """How many members come before each changed one.

        Args:
            places: of the changed members, ascending.
            is_changed: of every weight of the piece, the same.
        """
        word_of = places >> 6
        bits = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
        words = self._words[word_of]
        return self._ends[word_of] - np.bitwise_count(words) + np.bitwise_count(words & bits)

    def places(self, ranks: Places) -> Places:
        """Where the members of those numbers are, each in 0..count-1."""
        if len(ranks) * _LIST_FROM > self.count + 10 * len(self._words):
            return np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little").view(np.bool_))[ranks]
        word_of = np.searchsorted(self._ends, ranks, side="right")
        words = self._words[word_of]
        inside = (ranks - self._ends[word_of] + np.bitwise_count(words)).astype(np.uint64)
        # Set bits up to and including each byte, in that byte.
        sums = np.bitwise_count(words.view(np.uint8)).view(np.uint64) * _ONES
        num_bytes = np.bitwise_count((((inside * _ONES) | _HIGH) - sums) & _HIGH)
        shift = num_bytes.astype(np.uint64) << np.uint64(3)
        before = ((sums << np.uint64(8)) >> shift) & _BYTE
        byte = (words >> shift) & _BYTE
        found = _SELECT[(byte << np.uint64(3)) + inside - before]
        return (word_of << 6) + shift.astype(np.int64) + found


class Listed:
    """The members of one class as a list of places: quicker than a bitmap where they are few."""

    def __init__(self, members: Places) -> None:
        """`members`: ascending."""
        self._members = members
        self.count = len(members)

    def ranks(self, places: Places, is_changed: NDArray[np.bool_]) -> Places:
        """As `Mapped.ranks`."""
        return np.flatnonzero(is_changed[self._members])

    def places(self, ranks: Places) -> Places:
        """Where the members of those numbers are, each in 0..count-1."""
        return self._members[ranks]


Members = Mapped | Listed


class Scratch:
    """Memory that is used for piece after piece: fresh pages would cost more than what is written to them."""

    def __init__(self, info: DtypeInfo) -> None:
        self._keys = np.empty(0, info.bits_dtype)
        self._mask = np.empty(0, np.bool_)

    def keys(self, count: int) -> Bits:
        """[count] unsigned integers of any content; valid until the next call."""
        if len(self._keys) < count:
            self._keys = np.empty(count, self._keys.dtype)
        return self._keys[:count]

    def mask(self, count: int) -> NDArray[np.bool_]:
        """[count] truth values of any content; valid until the next call."""
        if len(self._mask) < count:
            self._mask = np.empty(count, np.bool_)
        return self._mask[:count]


def members_by_class(
    base: Bits, info: DtypeInfo, thresholds: tuple[int, ...], table: ClassTable, scratch: Scratch
) -> list[Members]:
    """The classes of one piece of the base: class c holds magnitudes from threshold c - 1 to below threshold c.

    Args:
        thresholds: ascending magnitudes; none makes one class of everything.
        table: of the thresholds.
    """
    above: list[Members] = []  # from the largest magnitudes down
    words = _all_words(len(base))
    keys = magnitudes(base, info, scratch.keys(len(base))) if thresholds else base
    below = scratch.mask(len(base))
    for threshold in reversed(thresholds):
        np.less(keys, base.dtype.type(threshold), out=below)
        outer, words = words, _packed(below)
        above.append(Mapped(outer ^ words))
        if int(np.bitwise_count(words).sum()) * _LIST_BELOW <= len(base):
            return _listed(places_of(below), keys, info, table, len(thresholds) - len(above) + 1) + above[::-1]
    return [Mapped(words), *above[::-1]]


def _listed(places: Places, keys: Bits, info: DtypeInfo, table: ClassTable, num_classes: int) -> list[Members]:
    """The classes below a threshold, whose members are at `places`."""
    class_of = classes_of(keys[places], info, table)
    ends = np.cumsum(np.bincount(class_of, minlength=num_classes))
    return [Listed(part) for part in np.split(places[np.argsort(class_of, kind="stable")], ends[:-1])]


def _all_words(count: int) -> Words:
    words = np.full(-(-count // 64), ~np.uint64(0))
    if count % 64:
        words[-1] = np.uint64((1 << count % 64) - 1)
    return words


def _packed(mask: NDArray[np.bool_]) -> Words:
    bits = np.packbits(mask, bitorder="little")
    if len(bits) % 8:
        bits = np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)])
    return bits.view(np.uint64)


def class_table(info: DtypeInfo, thresholds: tuple[int, ...]) -> ClassTable:
    """[exponents] the class of each; see `classes_of`."""
    if info.mantissa_bits is None:
        return np.zeros(1, np.uint8)
    exponents = np.arange(1 << (8 * info.size - 1 - info.mantissa_bits))
    limits = [threshold >> info.mantissa_bits for threshold in thresholds]
    return np.searchsorted(limits, exponents, side="right").astype(np.uint8)


def classes_of(bits: Bits, info: DtypeInfo, table: ClassTable) -> NDArray[np.uint8]:
    """[n] classes of weights with those patterns."""
    if info.mantissa_bits is None:
        return np.zeros(len(bits), np.uint8)
    keys = magnitudes(bits, info, np.empty_like(bits))
    keys >>= info.mantissa_bits
    return table[keys]
