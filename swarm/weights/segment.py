"""Segments: the changes of consecutive pieces of one dtype, coded class by class in shared streams.

Invariant: a reader takes memory for at most _MAX_CHANGES changes and SEGMENT_PIECES pieces, whatever a segment claims,
and knows the length of every stream (of bitmaps: a bound) before it reads it.

    segment
      num_pieces  u32
      headers     4 streams, the byte planes of u32 [pieces * classes]: changed weights (26 bits) | encoding (6 bits)
      gaps        3 streams: high bits u8 (255: see the next stream), wide ones u32, low bits packed by width
      bitmaps     1 stream for each class that has a part so encoded
      deltas      for each class with changes: encoding u8, then its streams (`swarm.weights.ulp_delta`)

A part is one class of one piece. Its encoding depends on the share of changed weights: all (nothing follows), at least
_BITMAP_FROM (a bitmap) or fewer (gaps). A gap is the number of unchanged weights before a changed one (see the example
in `ClassOrder`). Its low bits are nearly incompressible; its high bits average 32 to 64 and take one byte.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.exponent_classes import ClassOrder, ExponentClasses, Flags, Positions, Scratch, positions_of
from swarm.weights.payload import (
    MalformedPayload,
    StreamReader,
    UnusableReason,
    malformed,
    pack,
    pack_bits,
    pack_planes,
    packed_size,
    unpack_bits,
    unpack_planes,
)
from swarm.weights.tensors import Bits
from swarm.weights.ulp_delta import UlpReader, UlpWriter, add_ulp_deltas, ulp_deltas

PIECE: Final = 1 << 20  # weights
SEGMENT_CHANGES: Final = 1 << 20  # a segment ends with the piece that reaches this
SEGMENT_PIECES: Final = 4096
_MAX_CHANGES: Final = SEGMENT_CHANGES + PIECE
_U32: Final = struct.Struct("<I")

MAX_LOW_BITS: Final = 24  # encodings up to this are gaps with so many low bits
ENCODING_ALL: Final = 30  # every weight of the part changed
ENCODING_BITMAP: Final = 31
_ENCODING_SHIFT: Final = 26
_COUNT_MASK: Final = (1 << _ENCODING_SHIFT) - 1
_ESCAPE: Final = 255
_MAX_GAP: Final = (1 << 32) - (1 << MAX_LOW_BITS)  # of the high bits, so that a whole gap fits 32 bits
_BITMAP_FROM: Final = 0.08  # share of changed weights from which a bitmap is smaller
_NO_NUMBERS: Final = np.zeros(0, np.uint32)


class SegmentWriter:
    """Collects the changes of pieces for one segment."""

    def __init__(self, classes: ExponentClasses) -> None:
        self._classes = classes
        self._headers: list[int] = []
        self._gaps = GapWriter()
        self._bitmaps: list[list[bytes]] = [[] for _ in range(classes.count)]
        self._deltas = UlpWriter(classes.count)
        self._num_changes = 0
        self._scratch = Scratch(classes.info)
        self._changed = Scratch(classes.info)

    @property
    def num_pieces(self) -> int:
        """Pieces added so far."""
        return len(self._headers) // self._classes.count

    @property
    def is_full(self) -> bool:
        """True when no further piece should be added."""
        return self._num_changes >= SEGMENT_CHANGES or self.num_pieces >= SEGMENT_PIECES

    def add(self, base: Bits, target: Bits) -> None:
        """Adds the changes of the next piece."""
        is_changed = np.not_equal(base, target, out=self._changed.mask(len(base)))
        changed = positions_of(is_changed)
        if not len(changed):
            self._headers += [0] * self._classes.count
            return
        self._num_changes += len(changed)
        old = base[changed]
        deltas = ulp_deltas(old, target[changed], self._classes.info)
        order = ClassOrder(base, self._classes, self._scratch)
        by_rank, ranks, flags = order.ranks(changed, old, is_changed)
        counts: list[int] = np.diff(np.searchsorted(ranks, order.starts)).tolist()
        self._deltas.add(deltas[by_rank], counts)
        self._add_ranks(ranks, flags, order.starts, counts)

    def _add_ranks(self, ranks: Positions, flags: Flags, starts: list[int], counts: list[int]) -> None:
        gaps, done = gaps_of(ranks, starts, counts), 0
        for class_index, (count, (start, end)) in enumerate(zip(counts, pairwise(starts), strict=True)):
            encoding = encoding_of(end - start, count) if count else 0
            self._headers.append(count | encoding << _ENCODING_SHIFT)
            if encoding == ENCODING_BITMAP:
                if end > len(flags):
                    flags = np.zeros(end, np.bool_)
                    flags[ranks[: done + count]] = True
                self._bitmaps[class_index].append(np.packbits(flags[start:end], bitorder="little").tobytes())
            elif count and encoding != ENCODING_ALL:
                self._gaps.add(gaps[done : done + count], encoding)
            done += count

    def to_bytes(self) -> bytes:
        """The segment in the layout of this module's docstring."""
        headers = np.array(self._headers, "<u4")
        parts = [_U32.pack(self.num_pieces), *(pack(plane) for plane in pack_planes(headers)), self._gaps.to_bytes()]
        parts += [pack(b"".join(bitmaps)) for bitmaps in self._bitmaps if bitmaps]
        return b"".join([*parts, self._deltas.to_bytes()])


class SegmentReader:
    """Reads a segment and applies the changes piece by piece."""

    def __init__(self, reader: StreamReader, classes: ExponentClasses, max_pieces: int) -> None:
        """Reads a whole segment. Raises MalformedPayload."""
        self._classes = classes
        (self.num_pieces,) = reader.numbers(_U32)
        if not 0 < self.num_pieces <= min(max_pieces, SEGMENT_PIECES):
            raise malformed(f"segment of {self.num_pieces} pieces, expected 1 to {min(max_pieces, SEGMENT_PIECES)}")
        num_parts = self.num_pieces * classes.count
        headers = unpack_planes([reader.stream(num_parts, num_parts) for _ in range(4)], np.dtype("<u4"))
        counts = (headers & np.uint32(_COUNT_MASK)).astype(np.int64)
        encodings = (headers >> np.uint32(_ENCODING_SHIFT)).astype(np.int64)
        num_changes = int(counts.sum())
        if num_changes > _MAX_CHANGES:
            raise MalformedPayload(UnusableReason.TOO_LARGE, f"segment of {num_changes} changes exceeds {_MAX_CHANGES}")
        self._gaps = GapReader(reader, counts, encodings)
        self._counts = counts.reshape(-1, classes.count)
        self._encodings = encodings.reshape(-1, classes.count)
        self._bitmaps = [self._read_bitmaps(reader, class_index) for class_index in range(classes.count)]
        self._deltas = UlpReader(reader, self._counts.sum(axis=0).tolist(), classes.info.bits_dtype)
        self._next = 0
        self._scratch = Scratch(classes.info)

    def _read_bitmaps(self, reader: StreamReader, class_index: int) -> memoryview:
        is_bitmap = (self._encodings[:, class_index] == ENCODING_BITMAP) & (self._counts[:, class_index] > 0)
        if not is_bitmap.any():
            return memoryview(b"")
        num_changed, num_bitmaps = int(self._counts[is_bitmap, class_index].sum()), int(np.count_nonzero(is_bitmap))
        return memoryview(reader.stream(0, int(num_changed / _BITMAP_FROM / 8) + num_bitmaps))

    def apply(self, piece: Bits) -> None:
        """Turns the base's bits of the next piece into the target's, in place. Raises MalformedPayload."""
        counts: list[int] = self._counts[self._next].tolist()
        encodings: list[int] = self._encodings[self._next].tolist()
        self._next += 1
        self.num_pieces -= 1
        if any(counts):
            order = ClassOrder(piece, self._classes, self._scratch)
            positions = order.positions(self._ranks(order.starts, counts, encodings))
            piece[positions] = add_ulp_deltas(piece[positions], self._deltas.take(counts), self._classes.info)
        if not self.num_pieces and any(len(bitmap) for bitmap in self._bitmaps):
            raise malformed("bitmaps are longer than their classes")

    def _ranks(self, starts: list[int], counts: list[int], encodings: list[int]) -> Positions:
        """Ranks of all changed weights of a piece, ascending. Raises MalformedPayload."""
        parts: list[Positions] = []
        for class_index, (count, encoding, (start, end)) in enumerate(
            zip(counts, encodings, pairwise(starts), strict=True)
        ):
            if count > end - start:
                raise malformed(f"{count} of {end - start} weights of a class changed")
            if count:
                ranks = self._read_part(class_index, count, encoding, end - start)
                ranks += start
                parts.append(ranks)
        return np.concatenate(parts)

    def _read_part(self, class_index: int, count: int, encoding: int, num_weights: int) -> Positions:
        if encoding == ENCODING_ALL:
            if count != num_weights:
                raise malformed(f"{count} changes for all of {num_weights} weights")
            return np.arange(num_weights)
        if encoding != ENCODING_BITMAP:
            return self._gaps.take(count, num_weights)
        size = -(-num_weights // 8)
        bitmaps = self._bitmaps[class_index]
        bitmap, self._bitmaps[class_index] = bitmaps[:size], bitmaps[size:]
        if len(bitmap) < size:
            raise malformed("bitmap is shorter than its class")
        bits: NDArray[np.uint8] = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
        ranks = np.flatnonzero(bits.view(np.bool_))
        if len(ranks) != count or ranks[-1] >= num_weights:
            raise malformed(f"bitmap of {len(ranks)} changes, expected {count}")
        return ranks


# --- parts: the changed weights of a class -----------------------------------------------------


def encoding_of(num_weights: int, num_changed: int) -> int:
    """Encoding of a part with changes: ENCODING_ALL, ENCODING_BITMAP, or the number of low bits of its gaps."""
    if num_changed == num_weights:
        return ENCODING_ALL
    if num_changed >= _BITMAP_FROM * num_weights:
        return ENCODING_BITMAP
    return max(0, math.floor(math.log2(num_weights / num_changed)) - 5)  # high bits average 32 to 64, one byte


@dataclass(slots=True)
class GapWriter:
    """Collects the gaps of the parts of a segment."""

    _high: list[NDArray[np.uint32]] = field(default_factory=list[NDArray[np.uint32]])
    _lows: dict[int, list[NDArray[np.uint32]]] = field(default_factory=dict[int, list[NDArray[np.uint32]]])

    def add(self, gaps: NDArray[np.uint32], low_bits: int) -> None:
        """Adds the gaps of one part."""
        if low_bits:
            self._lows.setdefault(low_bits, []).append(gaps & np.uint32((1 << low_bits) - 1))
            gaps = gaps >> np.uint32(low_bits)
        self._high.append(gaps)

    def to_bytes(self) -> bytes:
        """Three streams: high bits as bytes, high bits too large for a byte, and low bits in order of width."""
        lows = b"".join(pack_bits(np.concatenate(self._lows[bits]), bits) for bits in sorted(self._lows))
        high = np.concatenate([*self._high, _NO_NUMBERS])
        narrow, wide = np.minimum(high, np.uint32(_ESCAPE)).astype(np.uint8), high[high >= _ESCAPE]
        return pack(narrow.tobytes()) + pack(wide.astype("<u4").tobytes()) + pack(lows)


def gaps_of(ranks: Positions, starts: Sequence[int], counts: Sequence[int]) -> NDArray[np.uint32]:
    """Gaps of all parts of a piece, in order: unchanged weights before each changed one.

    Args:
        ranks: [n] ascending.
        starts: rank of the first weight of each part.
        counts: changed weights of each part, n in all.
    """
    gaps = np.empty(len(ranks), np.uint32)
    np.subtract(ranks[1:], ranks[:-1], out=gaps[1:], casting="unsafe")
    gaps -= np.uint32(1)
    for first, start, count in zip(accumulate(counts, initial=0), starts, counts, strict=False):
        if count:
            gaps[first] = ranks[first] - start
    return gaps


class GapReader:
    """Reads the gap-coded parts of a segment."""

    def __init__(self, reader: StreamReader, counts: Positions, encodings: Positions) -> None:
        """Reads the three streams of the parts with these counts and encodings. Raises MalformedPayload."""
        if np.any((encodings > MAX_LOW_BITS) & (encodings < ENCODING_ALL)):
            raise malformed("unknown encoding of a part")
        of_gaps = (counts > 0) & (encodings <= MAX_LOW_BITS)
        total = int(counts[of_gaps].sum())
        gaps = np.frombuffer(reader.stream(total, total), np.uint8).astype(np.uint32)
        wide_at = np.flatnonzero(gaps == _ESCAPE)
        wide = np.frombuffer(reader.stream(4 * len(wide_at), 4 * len(wide_at)), "<u4")
        gaps[wide_at] = wide
        low_bits = np.repeat(encodings[of_gaps].astype(np.uint32), counts[of_gaps])
        largest = int((wide.astype(np.int64) << low_bits[wide_at].astype(np.int64)).max(initial=0))
        if largest > _MAX_GAP:  # narrow ones fit with any low bits
            raise malformed(f"gap of about {largest} weights")
        gaps <<= low_bits
        _add_low_bits(reader, gaps, low_bits)
        self._gaps = gaps
        self._next = 0

    def take(self, count: int, num_weights: int) -> Positions:
        """Ranks of the changed weights of the next part, all below `num_weights`. Raises MalformedPayload."""
        gaps = self._gaps[self._next : self._next + count]
        self._next += count
        ranks = np.cumsum(gaps, dtype=np.int64)
        ranks += np.arange(count)
        if ranks[-1] >= num_weights:
            raise malformed(f"weight {int(ranks[-1])} of {num_weights} changed")
        return ranks


def _add_low_bits(reader: StreamReader, gaps: NDArray[np.uint32], low_bits: NDArray[np.uint32]) -> None:
    """Reads the low bits of all gaps and adds them, in place. Raises MalformedPayload."""
    counts = np.bincount(low_bits, minlength=1)
    parts = [(width, count) for width, count in enumerate(counts.tolist()) if width and count]
    total = sum(packed_size(count, width) for width, count in parts)
    data, start = reader.stream(total, total), 0
    for width, count in parts:
        size = packed_size(count, width)
        lows: NDArray[Any] = unpack_bits(data[start : start + size], count, width)
        gaps[np.flatnonzero(low_bits == width)] += lows
        start += size
