"""Which members of a class changed: a bitmap where many did, gaps where few did.

Invariant: how places are written is said by one 32-bit part header (count and way), so a reader knows the length of
every gap stream before it has looked at the base.

A gap is the number of unchanged members in between. Its low bits are as good as random and travel as they are; the
rest averages between 32 and 64, takes one byte, and 255 stands for a number in the stream of wide gaps.
"""

import math
from dataclasses import dataclass, field
from typing import Final

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
_MAX_GAP: Final = 1 << 32
_BITMAP_FROM: Final = 0.08  # share of changed members from which a bitmap is smaller


def part_header(num_members: int, num_changed: int) -> tuple[int, int]:
    """The header of one part (a class of a piece) with changes, and the way in it: low bits of the gaps, or WAY_..."""
    if num_changed == num_members:
        way = WAY_ALL
    elif num_changed >= _BITMAP_FROM * num_members:
        way = WAY_BITMAP
    else:
        way = _low_bits_of(num_members, num_changed)
    return num_changed | way << _WAY_SHIFT, way


def _low_bits_of(num_members: int, num_changed: int) -> int:
    """How many low bits of a gap travel as they are, so that the rest averages between 32 and 64."""
    return max(0, math.floor(math.log2(num_members / num_changed)) - 5)


def counts_of(headers: NDArray[np.uint32]) -> Places:
    """Changed members of each part."""
    return (headers & np.uint32(_COUNT_MASK)).astype(np.int64)


def ways_of(headers: NDArray[np.uint32]) -> Places:
    """Low bits of the gaps, WAY_ALL or WAY_BITMAP of each part."""
    return (headers >> np.uint32(_WAY_SHIFT)).astype(np.int64)


def max_bitmap_bytes(num_changed: int, num_bitmaps: int) -> int:
    """Most bytes of bitmaps with so many changed members in all."""
    return int(num_changed / _BITMAP_FROM / 8) + num_bitmaps


@dataclass(slots=True)
class GapWriter:
    """Collects the gaps of the parts of a segment."""

    _gaps: list[NDArray[np.uint8]] = field(default_factory=list[NDArray[np.uint8]])
    _wide: list[NDArray[np.uint32]] = field(default_factory=list[NDArray[np.uint32]])
    _lows: dict[int, list[NDArray[np.uint32]]] = field(default_factory=dict[int, list[NDArray[np.uint32]]])

    def add(self, ranks: Places, low_bits: int) -> None:
        """One part: ascending numbers of members."""
        gaps = (np.diff(ranks, prepend=-1) - 1).astype(np.uint32)
        if low_bits:
            self._lows.setdefault(low_bits, []).append(gaps & np.uint32((1 << low_bits) - 1))
        high = gaps >> np.uint32(low_bits)
        self._gaps.append(np.minimum(high, _ESCAPE).astype(np.uint8))
        self._wide.append(high[high >= _ESCAPE])

    def packed(self) -> bytes:
        """Three streams: gaps, wide gaps, low bits by their number."""
        lows = b"".join(pack_bits(np.concatenate(self._lows[bits]), bits) for bits in sorted(self._lows))
        gaps, wide = np.concatenate([*self._gaps, _NO_BYTES]), np.concatenate([*self._wide, _NO_NUMBERS])
        return pack(gaps.tobytes()) + pack(wide.astype("<u4").tobytes()) + pack(lows)


_NO_BYTES: Final = np.zeros(0, np.uint8)
_NO_NUMBERS: Final = np.zeros(0, np.uint32)


class GapReader:
    """Gives the parts of a segment back, in order."""

    def __init__(self, reader: StreamReader, counts: Places, ways: Places) -> None:
        """Reads the three streams of the parts with those counts and ways. Raises Malformed."""
        if np.any((ways > MAX_LOW_BITS) & (ways < WAY_ALL)):
            raise malformed("unknown way of writing places")
        of_gaps = (counts > 0) & (ways <= MAX_LOW_BITS)
        total = int(counts[of_gaps].sum())
        narrow = np.frombuffer(reader.stream(total, total), np.uint8)
        is_wide = narrow == _ESCAPE
        num_wide = int(is_wide.sum())
        wide = np.frombuffer(reader.stream(4 * num_wide, 4 * num_wide), "<u4")
        gaps = narrow.astype(np.int64)
        gaps[is_wide] = wide
        low_bits = np.repeat(ways[of_gaps], counts[of_gaps])
        self._gaps = (gaps << low_bits) + _read_lows(reader, low_bits)
        if int(self._gaps.max(initial=0)) > _MAX_GAP:  # sums of bounded gaps cannot overflow
            raise malformed(f"gap of {int(self._gaps.max())} members")
        self._next = 0

    def take(self, count: int, num_members: int) -> Places:
        """Ranks of the next part, all below `num_members`. Raises Malformed."""
        gaps = self._gaps[self._next : self._next + count]
        self._next += count
        ranks = np.cumsum(gaps + 1) - 1
        if ranks[-1] >= num_members:
            raise malformed(f"member {int(ranks[-1])} of {num_members} changed")
        return ranks


def _read_lows(reader: StreamReader, low_bits: Places) -> Places:
    """[gaps] low bits, 0 where a gap has none."""
    widths, counts = np.unique(low_bits, return_counts=True)
    parts = [(int(width), int(count)) for width, count in zip(widths, counts, strict=True) if width]
    total = sum(packed_size(count, width) for width, count in parts)
    data = reader.stream(total, total)
    lows, start = np.zeros(len(low_bits), np.int64), 0
    for width, count in parts:
        size = packed_size(count, width)
        lows[low_bits == width] = unpack_bits(data[start : start + size], count, width)
        start += size
    return lows
