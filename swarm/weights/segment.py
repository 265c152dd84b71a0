"""The changes of consecutive pieces of one dtype: places by class, values by class, in shared streams.

Invariant: a reader takes memory for at most _MAX_CHANGES changes and SEGMENT_PIECES pieces, whatever a segment claims,
and knows the length of every stream (of bitmaps: a bound) before it reads it.

Layout: pieces u32; part headers, a part being a class of a piece (byte planes); gap streams; bitmaps of each class
that has some; values of each class that has some.
"""

import struct
from itertools import pairwise
from typing import Final

import numpy as np

from swarm.weights.bitpack import pack_planes, unpack_planes
from swarm.weights.classes import Classes
from swarm.weights.members import Flags, Members, Places, Scratch, places_of
from swarm.weights.places import (
    WAY_ALL,
    WAY_BITMAP,
    GapReader,
    GapWriter,
    bitmap_of,
    counts_of,
    gaps_of,
    header_of,
    max_bitmap_bytes,
    read_bitmap,
    way_of,
    ways_of,
)
from swarm.weights.refuse import Malformed, UnusableReason, malformed
from swarm.weights.steps import stepped, steps
from swarm.weights.streams import StreamReader, pack
from swarm.weights.tensors import Bits
from swarm.weights.values import ValueReader, ValueWriter

PIECE: Final = 1 << 20  # weights
SEGMENT_CHANGES: Final = 1 << 20  # a segment ends with the piece that reaches this
SEGMENT_PIECES: Final = 4096
_MAX_CHANGES: Final = SEGMENT_CHANGES + PIECE
_U32: Final = struct.Struct("<I")


class SegmentWriter:
    """Collects the changes of pieces."""

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._headers: list[int] = []
        self._gaps = GapWriter()
        self._bitmaps: list[list[bytes]] = [[] for _ in range(classes.count)]
        self._values = ValueWriter(classes.count)
        self._num_changes = 0
        self._scratch = Scratch(classes.info)
        self._changed = Scratch(classes.info)

    @property
    def num_pieces(self) -> int:
        """So far."""
        return len(self._headers) // self._classes.count

    @property
    def is_full(self) -> bool:
        """No further piece should be added."""
        return self._num_changes >= SEGMENT_CHANGES or self.num_pieces >= SEGMENT_PIECES

    def add(self, base: Bits, target: Bits) -> None:
        """The next piece."""
        is_changed = np.not_equal(base, target, out=self._changed.mask(len(base)))
        changed = places_of(is_changed)
        if not len(changed):
            self._headers += [0] * self._classes.count
            return
        self._num_changes += len(changed)
        old = base[changed]
        numbers = steps(old, target[changed], self._classes.info)
        members = Members(base, self._classes, self._scratch)
        order, ranks, flags = members.ranks(changed, old, is_changed)
        counts: list[int] = np.diff(np.searchsorted(ranks, members.starts)).tolist()
        self._values.add(numbers[order], counts)
        self._add_places(ranks, flags, members.starts, counts)

    def _add_places(self, ranks: Places, flags: Flags, starts: list[int], counts: list[int]) -> None:
        gaps, done = gaps_of(ranks, starts, counts), 0
        for number, (count, (start, end)) in enumerate(zip(counts, pairwise(starts), strict=True)):
            way = way_of(end - start, count) if count else 0
            self._headers.append(header_of(count, way))
            if way == WAY_BITMAP:
                if end > len(flags):
                    flags = np.zeros(end, np.bool_)
                    flags[ranks[: done + count]] = True
                self._bitmaps[number].append(bitmap_of(flags[start:end]))
            elif count and way != WAY_ALL:
                self._gaps.add(gaps[done : done + count], way)
            done += count

    def packed(self) -> bytes:
        """The segment."""
        headers = np.array(self._headers, "<u4")
        parts = [_U32.pack(self.num_pieces), *(pack(plane) for plane in pack_planes(headers)), self._gaps.packed()]
        parts += [pack(b"".join(bitmaps)) for bitmaps in self._bitmaps if bitmaps]
        return b"".join([*parts, self._values.packed()])


class SegmentReader:
    """Gives the changes of a segment back, piece by piece."""

    def __init__(self, reader: StreamReader, classes: Classes, max_pieces: int) -> None:
        """Reads a whole segment. Raises Malformed."""
        self._classes = classes
        (self.num_pieces,) = reader.numbers(_U32)
        if not 0 < self.num_pieces <= min(max_pieces, SEGMENT_PIECES):
            raise malformed(f"segment of {self.num_pieces} pieces, {max_pieces} are left")
        num_parts = self.num_pieces * classes.count
        headers = unpack_planes([reader.stream(num_parts, num_parts) for _ in range(4)], np.dtype("<u4"))
        counts, ways = counts_of(headers), ways_of(headers)
        num_changes = int(counts.sum())
        if num_changes > _MAX_CHANGES:
            raise Malformed(UnusableReason.TOO_LARGE, f"segment of {num_changes} changes exceeds {_MAX_CHANGES}")
        self._gaps = GapReader(reader, counts, ways)
        self._counts = counts.reshape(-1, classes.count)
        self._ways = ways.reshape(-1, classes.count)
        self._bitmaps = [self._read_bitmaps(reader, number) for number in range(classes.count)]
        self._values = ValueReader(reader, self._counts.sum(axis=0).tolist(), classes.info.bits_dtype)
        self._next = 0
        self._scratch = Scratch(classes.info)

    def _read_bitmaps(self, reader: StreamReader, number: int) -> memoryview:
        is_bitmap = (self._ways[:, number] == WAY_BITMAP) & (self._counts[:, number] > 0)
        if not is_bitmap.any():
            return memoryview(b"")
        num_changed = int(self._counts[is_bitmap, number].sum())
        return memoryview(reader.stream(0, max_bitmap_bytes(num_changed, int(np.count_nonzero(is_bitmap)))))

    def apply(self, piece: Bits) -> None:
        """Turns the next piece of the base into that of the target. Raises Malformed."""
        counts: list[int] = self._counts[self._next].tolist()
        ways: list[int] = self._ways[self._next].tolist()
        self._next += 1
        self.num_pieces -= 1
        if any(counts):
            members = Members(piece, self._classes, self._scratch)
            places = members.places(self._ranks(members.starts, counts, ways))
            piece[places] = stepped(piece[places], self._values.take(counts), self._classes.info)
        if not self.num_pieces and any(len(bitmap) for bitmap in self._bitmaps):
            raise malformed("bitmaps are longer than their classes")

    def _ranks(self, starts: list[int], counts: list[int], ways: list[int]) -> Places:
        """Of all changed weights of a piece, class by class."""
        parts: list[Places] = []
        for number, (count, way, (start, end)) in enumerate(zip(counts, ways, pairwise(starts), strict=True)):
            if count > end - start:
                raise malformed(f"{count} of {end - start} members changed")
            if count:
                ranks = self._part(number, count, way, end - start)
                ranks += start
                parts.append(ranks)
        return np.concatenate(parts)

    def _part(self, number: int, count: int, way: int, num_members: int) -> Places:
        if way == WAY_ALL:
            if count != num_members:
                raise malformed(f"{count} changes for all of {num_members} members")
            return np.arange(num_members)
        if way != WAY_BITMAP:
            return self._gaps.take(count, num_members)
        size = -(-num_members // 8)
        bitmap, self._bitmaps[number] = self._bitmaps[number][:size], self._bitmaps[number][size:]
        if len(bitmap) < size:
            raise malformed("bitmap is shorter than its class")
        return read_bitmap(bitmap, count, num_members)
