"""The changes of consecutive pieces of one dtype: places by class, values by context, in shared streams.

Invariant: a reader takes memory for at most _MAX_CHANGES changes and SEGMENT_PIECES pieces, whatever a segment claims,
and knows the length of every stream (of bitmaps: a bound) before it reads it.

Layout: pieces u32; part headers, a part being a class of a piece (byte planes); gap streams; bitmaps of each class
that has some; values.
"""

import struct
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.bitpack import pack_planes, unpack_planes
from swarm.weights.classes import Tables
from swarm.weights.members import Members, Places, Scratch, classes_of, members_by_class, places_of
from swarm.weights.places import (
    WAY_ALL,
    WAY_BITMAP,
    GapReader,
    GapWriter,
    counts_of,
    max_bitmap_bytes,
    part_header,
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

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._num_classes = len(tables.place_thresholds) + 1
        self._headers: list[int] = []
        self._gaps = GapWriter()
        self._bitmaps: list[list[bytes]] = [[] for _ in range(self._num_classes)]
        self._values = ValueWriter(tables.info, tables.values, len(tables.value_thresholds) + 1)
        self._num_changes = 0
        self._scratch = Scratch(tables.info)
        self._changed = Scratch(tables.info)

    @property
    def num_pieces(self) -> int:
        """So far."""
        return len(self._headers) // self._num_classes

    @property
    def is_full(self) -> bool:
        """No further piece should be added."""
        return self._num_changes >= SEGMENT_CHANGES or self.num_pieces >= SEGMENT_PIECES

    def add(self, base: Bits, target: Bits) -> None:
        """The next piece."""
        is_changed = np.not_equal(base, target, out=self._changed.mask(len(base)))
        changed = places_of(is_changed)
        if not len(changed):
            self._headers += [0] * self._num_classes
            return
        self._num_changes += len(changed)
        tables = self._tables
        old = base[changed]
        class_of = classes_of(old, tables.info, tables.places)
        order = np.argsort(class_of, kind="stable")
        places, old = changed[order], old[order]
        self._values.add(old, steps(old, target[places], tables.info))
        ends: list[int] = np.cumsum(np.bincount(class_of, minlength=self._num_classes)).tolist()
        members = members_by_class(base, tables.info, tables.place_thresholds, tables.places, self._scratch)
        for number, (start, end) in enumerate(pairwise([0, *ends])):
            if start < end:
                self._add_part(number, members[number], places[start:end], is_changed)
            else:
                self._headers.append(0)

    def _add_part(self, number: int, members: Members, places: Places, is_changed: NDArray[np.bool_]) -> None:
        header, way = part_header(members.count, len(places))
        self._headers.append(header)
        if way == WAY_ALL:
            return
        ranks = members.ranks(places, is_changed)
        if way == WAY_BITMAP:
            bits = np.zeros(members.count, np.bool_)
            bits[ranks] = True
            self._bitmaps[number].append(np.packbits(bits, bitorder="little").tobytes())
        else:
            self._gaps.add(ranks, way)

    def packed(self) -> bytes:
        """The segment."""
        headers = np.array(self._headers, "<u4")
        parts = [_U32.pack(self.num_pieces), *(pack(plane) for plane in pack_planes(headers)), self._gaps.packed()]
        parts += [pack(b"".join(bitmaps)) for bitmaps in self._bitmaps if bitmaps]
        return b"".join([*parts, self._values.packed()])


class SegmentReader:
    """Gives the changes of a segment back, piece by piece."""

    def __init__(self, reader: StreamReader, tables: Tables, max_pieces: int) -> None:
        """Reads a whole segment. Raises Malformed."""
        self._tables = tables
        num_classes = len(tables.place_thresholds) + 1
        (self.num_pieces,) = reader.numbers(_U32)
        if not 0 < self.num_pieces <= min(max_pieces, SEGMENT_PIECES):
            raise malformed(f"segment of {self.num_pieces} pieces, {max_pieces} are left")
        num_parts = self.num_pieces * num_classes
        headers = unpack_planes([reader.stream(num_parts, num_parts) for _ in range(4)], np.dtype("<u4"))
        counts, ways = counts_of(headers), ways_of(headers)
        num_changes = int(counts.sum())
        if num_changes > _MAX_CHANGES:
            raise Malformed(UnusableReason.TOO_LARGE, f"segment of {num_changes} changes exceeds {_MAX_CHANGES}")
        self._gaps = GapReader(reader, counts, ways)
        self._counts = counts.reshape(-1, num_classes)
        self._ways = ways.reshape(-1, num_classes)
        self._bitmaps = [self._read_bitmaps(reader, number) for number in range(num_classes)]
        self._values = ValueReader(reader, tables.info, tables.values, len(tables.value_thresholds) + 1, num_changes)
        self._next = 0
        self._scratch = Scratch(tables.info)

    def _read_bitmaps(self, reader: StreamReader, number: int) -> memoryview:
        is_bitmap = (self._ways[:, number] == WAY_BITMAP) & (self._counts[:, number] > 0)
        if not is_bitmap.any():
            return memoryview(b"")
        num_changed = int(self._counts[is_bitmap, number].sum())
        return memoryview(reader.stream(0, max_bitmap_bytes(num_changed, int(np.count_nonzero(is_bitmap)))))

    def apply(self, base: Bits, target: Bits) -> None:
        """The next piece: changes `target`, a copy of `base`. Raises Malformed."""
        counts, ways = self._counts[self._next], self._ways[self._next]
        self._next += 1
        self.num_pieces -= 1
        if counts.any():
            places = self._places(base, counts, ways)
            old, info = base[places], self._tables.info
            target[places] = stepped(old, self._values.take(old), info)
        if not self.num_pieces and any(len(bitmap) for bitmap in self._bitmaps):
            raise malformed("bitmaps are longer than their classes")

    def _places(self, base: Bits, counts: Places, ways: Places) -> Places:
        """Of all changed weights of a piece, class by class."""
        tables = self._tables
        members = members_by_class(base, tables.info, tables.place_thresholds, tables.places, self._scratch)
        parts: list[Places] = []
        for number, (count, way) in enumerate(zip(counts.tolist(), ways.tolist(), strict=True)):
            if count > members[number].count:
                raise malformed(f"{count} of {members[number].count} members changed")
            if count:
                parts.append(members[number].places(self._ranks(number, count, way, members[number].count)))
        return np.concatenate(parts)

    def _ranks(self, number: int, count: int, way: int, num_members: int) -> Places:
        if way == WAY_ALL:
            if count != num_members:
                raise malformed(f"{count} changes for all of {num_members} members")
            return np.arange(num_members)
        if way == WAY_BITMAP:
            ranks, self._bitmaps[number] = _read_bitmap(self._bitmaps[number], count, num_members)
            return ranks
        return self._gaps.take(count, num_members)


def _read_bitmap(bitmaps: memoryview, count: int, num_members: int) -> tuple[Places, memoryview]:
    """Ranks in the next bitmap, and the bitmaps after it. Raises Malformed."""
    size = -(-num_members // 8)
    if size > len(bitmaps):
        raise malformed("bitmap is shorter than its class")
    bits: NDArray[np.uint8] = np.unpackbits(np.frombuffer(bitmaps[:size], np.uint8), bitorder="little")
    ranks = np.flatnonzero(bits.view(np.bool_))
    if len(ranks) != count or ranks[-1] >= num_members:
        raise malformed(f"bitmap of {len(ranks)} changes, expected {count}")
    return ranks, bitmaps[size:]
