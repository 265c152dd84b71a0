"""Which weights of a class changed: a bitmap where many did, gaps where few did.

Invariant: how a part (a class of a piece) is written is said by one 32-bit header (count and way), so a reader knows
the length of every gap stream before it has looked at the base.

A gap is the number of unchanged members in between. Its low bits are as good as random and travel as they are; the
rest averages between 32 and 64, takes one byte, and 255 stands for a number in the stream of wide gaps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.bitpack import pack_bits, packed_size, unpack_bits
from swarm.weights.members import Places
from swarm.weights.refuse import malformed
from swarm.weights.streams import StreamReader, pack

MAX_LOW_BITS: Final = 24
WAY_ALL: Final = 30  # every member changed
WAY_BITMAP: Final = 31
_WAY_SHIFT: Final = 26
_COUNT_MASK: Final = (1 << _WAY_SHIFT) - 1
_ESCAPE: Final = 255
_MAX_GAP: Final = (1 << 32) - (1 << MAX_LOW_BITS)  # of the high bits, so that all fit 32
_BITMAP_FROM: Final = 0.08  # share of changed members from which a bitmap is smaller
_NO_BYTES: Final = np.zeros(0, np.uint8)
_NO_NUMBERS: Final = np.zeros(0, np.uint32)


def way_of(num_members: int, num_changed: int) -> int:
    """How a part with changes is written: low bits of its gaps, so that the rest averages 32 to 64, or WAY_..."""
    if num_changed == num_members:
        return WAY_ALL
    if num_changed >= _BITMAP_FROM * num_members:
        return WAY_BITMAP
    return max(0, math.floor(math.log2(num_members / num_changed)) - 5)


def header_of(num_changed: int, way: int) -> int:
    """Of a part; 0 where nothing changed."""
    return num_changed | way << _WAY_SHIFT if num_changed else 0


def counts_of(headers: NDArray[np.uint32]) -> Places:
    """Changed members of each part."""
    return (headers & np.uint32(_COUNT_MASK)).astype(np.int64)


def ways_of(headers: NDArray[np.uint32]) -> Places:
    """Low bits of the gaps, WAY_ALL or WAY_BITMAP of each part."""
    return (headers >> np.uint32(_WAY_SHIFT)).astype(np.int64)


def max_bitmap_bytes(num_changed: int, num_bitmaps: int) -> int:
    """Most bytes of bitmaps with so many changed members in all."""
    return int(num_changed / _BITMAP_FROM / 8) + num_bitmaps


def bitmap_of(is_changed: NDArray[np.bool_]) -> bytes:
    """A part as bits, lowest first."""
    return np.packbits(is_changed, bitorder="little").tobytes()


def read_bitmap(bitmap: memoryview, count: int, num_members: int) -> Places:
    """Ranks of a part. Raises Malformed."""
    bits: NDArray[np.uint8] = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    ranks = np.flatnonzero(bits.view(np.bool_))
    if len(ranks) != count or ranks[-1] >= num_members:
        raise malformed(f"bitmap of {len(ranks)} changes, expected {count}")
    return ranks


@dataclass(slots=True)
class GapWriter:
    """Collects the gaps of the parts of a segment."""

    _high: list[NDArray[np.uint32]] = field(default_factory=list[NDArray[np.uint32]])
    _lows: dict[int, list[NDArray[np.uint32]]] = field(default_factory=dict[int, list[NDArray[np.uint32]]])

    def add(self, gaps: NDArray[np.uint32], low_bits: int) -> None:
        """One part."""
        if low_bits:
            self._lows.setdefault(low_bits, []).append(gaps & np.uint32((1 << low_bits) - 1))
            gaps = gaps >> np.uint32(low_bits)
        self._high.append(gaps)

    def packed(self) -> bytes:
        """Three streams: gaps, wide gaps, low bits by their number."""
        lows = b"".join(pack_bits(np.concatenate(self._lows[bits]), bits) for bits in sorted(self._lows))
        high = np.concatenate([*self._high, _NO_NUMBERS])
        narrow, wide = np.minimum(high, np.uint32(_ESCAPE)).astype(np.uint8), high[high >= _ESCAPE]
        return pack(narrow.tobytes()) + pack(wide.astype("<u4").tobytes()) + pack(lows)


def gaps_of(ranks: Places, starts: Sequence[int], counts: Sequence[int]) -> NDArray[np.uint32]:
    """Of all parts of a piece, one after the other.

    Args:
        ranks: [n] ascending.
        starts: rank of the first member of each part.
        counts: changed members of each part, n in all.
    """
    gaps = np.empty(len(ranks), np.uint32)
    np.subtract(ranks[1:], ranks[:-1], out=gaps[1:], casting="unsafe")
    gaps -= np.uint32(1)
    for first, start, count in zip(accumulate(counts, initial=0), starts, counts, strict=False):
        if count:
            gaps[first] = ranks[first] - start
    return gaps


class GapReader:
    """Gives the parts of a segment back, in order."""

    def __init__(self, reader: StreamReader, counts: Places, ways: Places) -> None:
        """Reads the three streams of the parts with those counts and ways. Raises Malformed."""
        if np.any((ways > MAX_LOW_BITS) & (ways < WAY_ALL)):
            raise malformed("unknown way of writing places")
        of_gaps = (counts > 0) & (ways <= MAX_LOW_BITS)
        total = int(counts[of_gaps].sum())
        gaps = np.frombuffer(reader.stream(total, total), np.uint8).astype(np.uint32)
        wide_at = np.flatnonzero(gaps == _ESCAPE)
        wide = np.frombuffer(reader.stream(4 * len(wide_at), 4 * len(wide_at)), "<u4")
        gaps[wide_at] = wide
        low_bits = np.repeat(ways[of_gaps].astype(np.uint32), counts[of_gaps])
        largest = int((wide.astype(np.int64) << low_bits[wide_at].astype(np.int64)).max(initial=0))
        if largest > _MAX_GAP:  # narrow ones fit whatever their low bits
            raise malformed(f"gap of about {largest} members")
        gaps <<= low_bits
        _add_lows(reader, gaps, low_bits)
        self._gaps = gaps
        self._next = 0

    def take(self, count: int, num_members: int) -> Places:
        """Ranks of the next part, all below `num_members`. Raises Malformed."""
        gaps = self._gaps[self._next : self._next + count]
        self._next += count
        ranks = np.cumsum(gaps, dtype=np.int64)
        ranks += np.arange(count)
        if ranks[-1] >= num_members:
            raise malformed(f"member {int(ranks[-1])} of {num_members} changed")
        return ranks


def _add_lows(reader: StreamReader, gaps: NDArray[np.uint32], low_bits: NDArray[np.uint32]) -> None:
    """Reads the low bits of all gaps that have some, and adds them. Raises Malformed."""
    counts = np.bincount(low_bits, minlength=1)
    parts = [(width, count) for width, count in enumerate(counts.tolist()) if width and count]
    total = sum(packed_size(count, width) for width, count in parts)
    data, start = reader.stream(total, total), 0
    for width, count in parts:
        size = packed_size(count, width)
        lows: NDArray[Any] = unpack_bits(data[start : start + size], count, width)
        gaps[np.flatnonzero(low_bits == width)] += lows
        start += size
