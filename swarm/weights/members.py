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

_ONES: Final = np.uint64(0x0101010101010101)
_HIGH: Final = np.uint64(0x8080808080808080)
_BYTE: Final = np.uint64(0xFF)


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

    def __init__(self, base: Bits, info: DtypeInfo, thresholds: tuple[int, ...]) -> None:
        """`thresholds`: ascending magnitudes; none makes one class of everything."""
        self._base = base
        self._info = info
        self._thresholds = thresholds
        self._keys = magnitudes(base, info, np.empty_like(base)) if thresholds else base
        self._mask = np.empty(len(base), np.bool_)
        self._below: dict[int, Words] = {}

    def classes_of(self, places: Places) -> NDArray[np.int64]:
        """Class of the weights at those places."""
        limits = np.array(self._thresholds, self._base.dtype)
        return np.searchsorted(limits, self._keys[places], side="right")

    def members(self, number: int) -> Members:
        """Of one class."""
        words = self._words_below(number)
        return Members(words ^ self._words_below(number - 1) if number else words)

    def _words_below(self, number: int) -> Words:
        """Bitmap of the magnitudes below a threshold; of everything, after the last one."""
        if number not in self._below:
            if number < len(self._thresholds):
                np.less(self._keys, self._base.dtype.type(self._thresholds[number]), out=self._mask)
            else:
                self._mask[:] = True
            packed = np.zeros(-(-len(self._base) // 64) * 8, np.uint8)
            bits = np.packbits(self._mask, bitorder="little")
            packed[: len(bits)] = bits
            self._below[number] = packed.view(np.uint64)
        return self._below[number]
