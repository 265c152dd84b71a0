"""The order of a piece's weights by class: which comes first, and where a weight of that number is.

Invariant: both sides of a patch hold the base, so the order is a function of the base's bits and costs no byte. A
weight changes about as often as an optimizer step is large against its ulp, which its exponent tells: coding places
among weights of like exponents takes a fraction of what coding them among all weights takes.

Small weights change most and are few: they are listed. The many large ones are bitmaps of 64 weights a word, with rank
and select, so that a weight that did not change costs no more than its bits.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.classes import LISTED_SHARE, Classes
from swarm.weights.steps import magnitudes
from swarm.weights.tensors import Bits, DtypeInfo

Words = NDArray[np.uint64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

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


def places_of(mask: Flags) -> Places:
    """Where a mask is True."""
    return _places_in(_packed(mask))


def _places_in(words: Words) -> Places:
    """Where bits are set, lowest first: by words, then bytes, so that few of those that are searched are empty."""
    some = np.flatnonzero(words != 0)
    in_words = words[some].view(np.uint8)
    some_bytes = np.flatnonzero(in_words != 0)
    found = np.flatnonzero(np.unpackbits(in_words[some_bytes], bitorder="little").view(np.bool_))
    starts = (some << 6)[some_bytes >> 3]
    starts += (some_bytes & 7) << 3
    places = starts[found >> 3]
    places += found & 7
    return places


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

    def mask(self, count: int) -> Flags:
        """[count] truth values of any content; valid until the next call."""
        if len(self._mask) < count:
            self._mask = np.empty(count, np.bool_)
        return self._mask[:count]


class Members:
    """The weights of a piece in order of class, then place; the number of a weight in that order is its rank."""

    def __init__(self, base: Bits, classes: Classes, scratch: Scratch) -> None:
        """Of one piece of the base, not empty; uses `scratch` as long as it lives."""
        self._classes = classes
        keys = magnitudes(base, classes.info, scratch.keys(len(base))) if classes.thresholds else base
        below = scratch.mask(len(base))
        words, mapped = _all_words(len(base)), list[Words]()  # mapped: from the largest magnitudes down
        listed: Places = _NONE
        for threshold in reversed(classes.thresholds):
            np.less(keys, keys.dtype.type(threshold), out=below)
            outer, words = words, _packed(below)
            mapped.append(outer ^ words)
            if int(np.bitwise_count(words).sum()) <= LISTED_SHARE * len(base):
                listed = _places_in(words)
                break
        else:
            mapped.append(words)
        self._num_words = len(words)
        self._words = np.concatenate(mapped[::-1])
        ends = np.bitwise_count(self._words).astype(np.int64)  # numpy sums wide numbers six times as quickly
        ends[0] += len(listed)
        self._ends = np.cumsum(ends, out=ends)
        self._first_mapped = classes.count - len(mapped)
        class_of = classes.of(keys[listed])
        self._listed = listed[np.argsort(class_of, kind="stable")]
        counts = np.bincount(class_of, minlength=self._first_mapped)[: self._first_mapped]
        self._first_words = (np.arange(classes.count) - self._first_mapped) * self._num_words
        mapped_ends = self._ends[self._num_words - 1 :: self._num_words]
        # starts[c] is the rank of the first weight of class c; one more at the end.
        self.starts: list[int] = [0, *np.cumsum(counts).tolist(), *mapped_ends.tolist()]

    def ranks(self, places: Places, old: Bits, is_changed: Flags) -> tuple[Places, Places, Flags]:
        """The order of changed weights.

        Args:
            places: of changed weights, ascending.
            old: their patterns in the base.
            is_changed: of every weight of the piece, the same.

        Returns:
            Numbers in `places`, by rank; their ranks, ascending; and of the lowest ranks, for each whether its weight
            changed.
        """
        class_of = self._classes.of(magnitudes(old, self._classes.info, np.empty_like(old)))
        order = np.argsort(class_of, kind="stable")
        flags = is_changed[self._listed]
        listed = np.flatnonzero(flags)
        if len(listed) == len(places):
            return order, listed, flags
        mapped = order[len(listed) :]
        places = places[mapped]
        word_of = self._first_words[class_of[mapped]]
        word_of += places >> 6
        ranks = self._ends[word_of]
        ranks -= np.bitwise_count(self._words[word_of] >> (places & 63).view(np.uint64))
        return order, np.concatenate([listed, ranks]) if len(listed) else ranks, flags

    def places(self, ranks: Places) -> Places:
        """Where the weights of those ranks are; ascending ranks below the number of weights."""
        num_listed = int(np.searchsorted(ranks, len(self._listed)))
        listed, mapped = self._listed[ranks[:num_listed]], ranks[num_listed:]
        if not len(mapped):
            return listed
        found = self._select(mapped) if len(mapped) <= len(self._words) else self._all_mapped(mapped)
        return np.concatenate([listed, found]) if num_listed else found

    def _all_mapped(self, ranks: Places) -> Places:
        """By listing every mapped weight: about as quick as selecting one in each word."""
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little").view(np.bool_)
        return np.flatnonzero(bits)[ranks - len(self._listed)] % (64 * self._num_words)

    def _select(self, ranks: Places) -> Places:
        word_of = np.searchsorted(self._ends, ranks, side="right")
        words = self._words[word_of]
        inside = (ranks - self._ends[word_of] + np.bitwise_count(words)).view(np.uint64)
        # Set bits up to and including each byte, in that byte.
        sums = np.bitwise_count(words.view(np.uint8)).view(np.uint64) * _ONES
        shift = np.bitwise_count((((inside * _ONES) | _HIGH) - sums) & _HIGH).astype(np.uint64) << np.uint64(3)
        before = ((sums << np.uint64(8)) >> shift) & _BYTE
        byte = (words >> shift) & _BYTE
        found = _SELECT[(byte << np.uint64(3)) + inside - before]
        class_ends = np.searchsorted(ranks, self.starts[self._first_mapped :])
        first_words = np.repeat(self._first_words[self._first_mapped :], np.diff(class_ends))
        return ((word_of - first_words) << 6) + shift.view(np.int64) + found


_NONE: Final[Places] = np.zeros(0, np.int64)


def _all_words(count: int) -> Words:
    words = np.full(-(-count // 64), ~np.uint64(0))
    if count % 64:
        words[-1] = np.uint64((1 << count % 64) - 1)
    return words


def _packed(mask: Flags) -> Words:
    bits = np.packbits(mask, bitorder="little")
    if len(bits) % 8:
        bits = np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)])
    return bits.view(np.uint64)
