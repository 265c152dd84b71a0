"""Where the weights of a class are: rank and select over bitmaps of 64 weights a word.

Invariant: both sides of a patch hold the base, so a class is a function of the base's bits and costs no byte. A weight
changes about as often as an optimizer step is large against its ulp, which its exponent tells: coding places among
weights of like exponents takes a fraction of what coding them among all weights takes.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.steps import magnitudes
from swarm.weights.tensors import Bits, DtypeInfo

Words = NDArray[np.uint64]
Places = NDArray[np.int64]

_ONES: Final = np.uint64(0x0101010101010101)
_HIGH: Final = np.uint64(0x8080808080808080)
_BYTE: Final = np.uint64(0xFF)
_LIST_FROM: Final = 32  # a look-up takes about 32 times as long as listing one member
_BLOCK: Final = 1 << 18  # weights


def _select_table() -> NDArray[np.uint8]:
    """[256 * 8] place of the set bit number r of a byte b, at 8 b + r."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        places = [place for place in range(8) if byte >> place & 1]
        table[byte, : len(places)] = places
    return table.reshape(-1)


_SELECT: Final = _select_table()


class Members:
    """The members of one class among the weights of a piece."""

    def __init__(self, words: Words) -> None:
        """`words`: bit i of word w is set where weight 64 w + i belongs to the class."""
        self._words = words
        self._ends = np.cumsum(np.bitwise_count(words), dtype=np.int64)
        self.count = int(self._ends[-1]) if len(words) else 0

    def ranks(self, places: Places) -> Places:
        """How many members come before each place."""
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


class ClassMap:
    """The classes of one piece of the base: class c holds magnitudes from threshold c - 1 to below threshold c."""

    def __init__(self, base: Bits, info: DtypeInfo, thresholds: tuple[int, ...], wanted: Iterable[int]) -> None:
        """Finds the members of the classes in `wanted`.

        Args:
            thresholds: ascending magnitudes; none makes one class of everything.
        """
        self._num_thresholds = len(thresholds)
        self._num_words = -(-len(base) // 64)
        numbers = {c for number in wanted for c in (number - 1, number) if 0 <= c < len(thresholds)}
        self._below = {number: np.zeros(self._num_words, np.uint64) for number in sorted(numbers)}
        self._len = len(base)
        keys = np.empty(min(_BLOCK, len(base)), base.dtype)
        mask = np.empty(len(keys), np.bool_)
        for start in range(0, len(base) if numbers else 0, _BLOCK):  # small enough to stay in the nearest caches
            block = base[start : start + _BLOCK]
            magnitudes(block, info, keys[: len(block)])
            for number, words in self._below.items():
                below = np.less(keys[: len(block)], base.dtype.type(thresholds[number]), out=mask[: len(block)])
                packed = np.packbits(below, bitorder="little")
                words.view(np.uint8)[start // 8 : start // 8 + len(packed)] = packed

    def members(self, number: int) -> Members:
        """Of one class among the wanted ones."""
        words = self._all() if number == self._num_thresholds else self._below[number]
        return Members(words ^ self._below[number - 1] if number else words)

    def _all(self) -> Words:
        """Bitmap of every weight of the piece."""
        words = np.full(self._num_words, ~np.uint64(0))
        if self._len % 64:
            words[-1] = np.uint64((1 << self._len % 64) - 1)
        return words


def class_table(info: DtypeInfo, thresholds: tuple[int, ...]) -> NDArray[np.uint8]:
    """[exponents] the class of each; see `classes_of`."""
    if info.mantissa_bits is None:
        return np.zeros(1, np.uint8)
    exponents = np.arange(1 << (8 * info.size - 1 - info.mantissa_bits))
    limits = [threshold >> info.mantissa_bits for threshold in thresholds]
    return np.searchsorted(limits, exponents, side="right").astype(np.uint8)


def classes_of(bits: Bits, info: DtypeInfo, table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n] classes of weights with those patterns."""
    if info.mantissa_bits is None:
        return np.zeros(len(bits), np.uint8)
    keys = magnitudes(bits, info, np.empty_like(bits))
    keys >>= info.mantissa_bits
    return table[keys]
