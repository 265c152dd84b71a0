"""The lossless patch between two versions of the same tensors: encoding and decoding, segment by segment.

Invariant: memory is bounded by one tensor and one segment (about 2^21 changes) on both sides, whatever a patch claims.

A tensor is cut into pieces of 2^20 weights, in order of dtype, then name. Places and values of the changed weights of
a piece are split by class (see `members`), and those of many pieces share the streams of a segment.

Layout: thresholds of each dtype (count u8, exponents u16), then segments: pieces u32; part headers; gap streams; for
each class bitmaps and values.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.bitpack import pack_planes, unpack_planes
from swarm.weights.classes import choose_thresholds
from swarm.weights.members import ClassMap, Members, Places, class_table, classes_of
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
from swarm.weights.tensors import DTYPES, Bits, DtypeInfo, HostTensor, TensorSpec, Weights, specs_of
from swarm.weights.values import pack_values, read_values

PIECE: Final = 1 << 20  # weights
SEGMENT_CHANGES: Final = 1 << 20  # a segment ends with the piece that reaches this
SEGMENT_PIECES: Final = 4096
_MAX_CHANGES: Final = SEGMENT_CHANGES + PIECE
_SAMPLE: Final = 1 << 14  # weights of a slice that thresholds are chosen by
_SAMPLED: Final = 1 << 22  # and about how many in all
_MAX_THRESHOLDS: Final = 15
_U32: Final = struct.Struct("<I")
Thresholds = Mapping[str, tuple[int, ...]]  # by dtype: magnitudes, ascending


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a flattened tensor."""

    spec: TensorSpec
    start: int
    stop: int


def pieces_of(specs: Iterable[TensorSpec]) -> list[Piece]:
    """All pieces, in the order that a patch has them: by dtype, name, place."""
    return [
        Piece(spec, start, min(start + PIECE, spec.num_elements))
        for spec in sorted(specs, key=lambda spec: (spec.dtype, spec.name))
        for start in range(0, spec.num_elements, PIECE)
    ]


# --- encoding ----------------------------------------------------------------------------------


def encode_delta(base: Weights, target: Weights) -> Iterator[bytes]:
    """The payload that turns `base` into `target`.

    Raises:
        ValueError: names, dtypes or shapes differ.
    """
    specs = specs_of(target)
    if specs_of(base) != specs:
        raise ValueError("a delta needs equal names, dtypes and shapes; publish the version in full")
    thresholds = {dtype: _sampled_thresholds(base, target, dtype) for dtype in sorted({s.dtype for s in specs})}
    yield b"".join(_pack_thresholds(thresholds[dtype], DTYPES[dtype]) for dtype in sorted(thresholds))
    for dtype, pieces in groupby(pieces_of(specs), key=lambda piece: piece.spec.dtype):
        segment = _SegmentWriter(DTYPES[dtype], thresholds[dtype])
        for name, of_tensor in groupby(pieces, key=lambda piece: piece.spec.name):
            old, new = base[name].bits, target[name].bits
            for piece in of_tensor:
                segment.add(old[piece.start : piece.stop], new[piece.start : piece.stop])
                if segment.is_full:
                    yield segment.packed()
                    segment = _SegmentWriter(DTYPES[dtype], thresholds[dtype])
        if segment.num_pieces:
            yield segment.packed()


def _sampled_thresholds(base: Weights, target: Weights, dtype: str) -> tuple[int, ...]:
    specs = [spec for spec in specs_of(base) if spec.dtype == dtype]
    total = sum(spec.num_elements for spec in specs)
    stride = max(1, total // _SAMPLED) * _SAMPLE
    samples: list[tuple[Bits, Bits]] = []
    passed, wanted, num_sampled = 0, 0, 0
    for spec in specs:
        while wanted < passed + spec.num_elements:
            start = wanted - passed
            part = slice(start, min(start + _SAMPLE, spec.num_elements))
            samples.append((base[spec.name].bits[part], target[spec.name].bits[part]))
            num_sampled += len(samples[-1][0])
            wanted += stride if part.stop - part.start == _SAMPLE else part.stop - part.start
        passed += spec.num_elements
    return choose_thresholds(samples, DTYPES[dtype], total / max(1, num_sampled))


def _pack_thresholds(thresholds: tuple[int, ...], info: DtypeInfo) -> bytes:
    exponents = [threshold >> (info.mantissa_bits or 0) for threshold in thresholds]
    return struct.pack(f"<B{len(exponents)}H", len(exponents), *exponents)


class _SegmentWriter:
    """Collects the changes of pieces of one dtype."""

    def __init__(self, info: DtypeInfo, thresholds: tuple[int, ...]) -> None:
        self._info = info
        self._thresholds = thresholds
        self._table = class_table(info, thresholds)
        self._num_classes = len(thresholds) + 1
        self._headers: list[int] = []
        self._gaps = GapWriter()
        self._bitmaps: list[list[bytes]] = [[] for _ in range(self._num_classes)]
        self._values: list[list[Bits]] = [[] for _ in range(self._num_classes)]
        self._num_changes = 0

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
        changed = np.flatnonzero(base != target)
        if not len(changed):
            self._headers += [0] * self._num_classes
            return
        self._num_changes += len(changed)
        old = base[changed]
        class_of = classes_of(old, self._info, self._table)
        order = np.argsort(class_of, kind="stable")
        places = changed[order]
        values = steps(old[order], target[places], self._info)
        ends = np.cumsum(np.bincount(class_of, minlength=self._num_classes))
        starts = ends - np.diff(ends, prepend=0)
        classes = ClassMap(base, self._info, self._thresholds, np.flatnonzero(ends - starts).tolist())
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            if start < end:
                self._add_part(number, classes.members(number), places[start:end])
                self._values[number].append(values[start:end])
            else:
                self._headers.append(0)

    def _add_part(self, number: int, members: Members, places: Places) -> None:
        header = part_header(members.count, len(places))
        self._headers.append(header)
        way = int(ways_of(np.array([header], np.uint32))[0])
        if way == WAY_ALL:
            return
        ranks = members.ranks(places)
        if way == WAY_BITMAP:
            is_changed = np.zeros(members.count, np.bool_)
            is_changed[ranks] = True
            self._bitmaps[number].append(np.packbits(is_changed, bitorder="little").tobytes())
        else:
            self._gaps.add(ranks, way)

    def packed(self) -> bytes:
        """The segment."""
        headers = np.array(self._headers, "<u4")
        parts = [_U32.pack(self.num_pieces), *(pack(plane) for plane in pack_planes(headers)), self._gaps.packed()]
        for bitmaps, values in zip(self._bitmaps, self._values, strict=True):
            if values:
                parts += [pack(b"".join(bitmaps)), pack_values(np.concatenate(values))]
        return b"".join(parts)


# --- decoding ----------------------------------------------------------------------------------


def decode_delta(base: Weights, buffers: Iterable[bytes | memoryview]) -> Iterator[HostTensor]:
    """The target's tensors, one by one in order of dtype and name; each is a copy, `base` stays as it is.

    Raises:
        Malformed: the payload is none for these specs.
    """
    specs = specs_of(base)
    reader = StreamReader(buffers)
    thresholds = {dtype: _read_thresholds(reader, DTYPES[dtype]) for dtype in sorted({s.dtype for s in specs})}
    for dtype, tensors in groupby(sorted(specs, key=lambda s: (s.dtype, s.name)), key=lambda s: s.dtype):
        specs_here = list(tensors)
        left = len(pieces_of(specs_here))
        segment: _SegmentReader | None = None
        for spec in specs_here:
            old = base[spec.name].bits
            new = old.copy()
            for start in range(0, spec.num_elements, PIECE):
                if segment is None or not segment.num_pieces:
                    segment = _SegmentReader(reader, DTYPES[dtype], thresholds[dtype], left)
                    left -= segment.num_pieces
                segment.apply(old[start : start + PIECE], new[start : start + PIECE])
            yield HostTensor(spec=spec, bits=new)
    reader.end()


def _read_thresholds(reader: StreamReader, info: DtypeInfo) -> tuple[int, ...]:
    (count,) = reader.take(1)
    if count > _MAX_THRESHOLDS or (count and info.mantissa_bits is None):
        raise malformed(f"{count} thresholds")
    exponents = reader.numbers(struct.Struct(f"<{count}H"))
    mantissa_bits = info.mantissa_bits or 0
    num_exponents = 1 << (8 * info.size - 1 - mantissa_bits)
    if any(e >= num_exponents for e in exponents) or sorted(set(exponents)) != list(exponents):
        raise malformed("thresholds are not ascending exponents")
    return tuple(exponent << mantissa_bits for exponent in exponents)


class _SegmentReader:
    """Gives the changes of a segment back, piece by piece."""

    def __init__(self, reader: StreamReader, info: DtypeInfo, thresholds: tuple[int, ...], max_pieces: int) -> None:
        """Reads a whole segment. Raises Malformed."""
        self._info = info
        self._thresholds = thresholds
        num_classes = len(thresholds) + 1
        (self.num_pieces,) = reader.numbers(_U32)
        if not 0 < self.num_pieces <= min(max_pieces, SEGMENT_PIECES):
            raise malformed(f"segment of {self.num_pieces} pieces, {max_pieces} are left")
        num_parts = self.num_pieces * num_classes
        planes = [reader.stream(num_parts, num_parts) for _ in range(4)]
        headers = unpack_planes(planes, np.dtype("<u4"))
        counts, ways = counts_of(headers), ways_of(headers)
        if int(counts.sum()) > _MAX_CHANGES:
            raise Malformed(UnusableReason.TOO_LARGE, f"segment of {int(counts.sum())} changes exceeds {_MAX_CHANGES}")
        self._gaps = GapReader(reader, headers)
        self._counts = counts.reshape(-1, num_classes)
        self._ways = ways.reshape(-1, num_classes)
        self._classes = [self._read_class(reader, number) for number in range(num_classes)]
        self._next = 0

    def _read_class(self, reader: StreamReader, number: int) -> "_ClassStream | None":
        counts = self._counts[:, number]
        total = int(counts.sum())
        if not total:
            return None
        of_bitmaps = self._ways[:, number] == WAY_BITMAP
        max_bytes = max_bitmap_bytes(int(counts[of_bitmaps].sum()), int(np.count_nonzero(of_bitmaps)))
        bitmaps = reader.stream(0, max_bytes)
        return _ClassStream(bitmaps, read_values(reader, total, self._info.bits_dtype))

    def apply(self, base: Bits, target: Bits) -> None:
        """The next piece: changes `target`, a copy of `base`. Raises Malformed."""
        counts, ways = self._counts[self._next], self._ways[self._next]
        self._next += 1
        self.num_pieces -= 1
        if not counts.any():
            if not self.num_pieces:
                self._finish()
            return
        wanted: list[int] = np.flatnonzero(counts).tolist()
        classes = ClassMap(base, self._info, self._thresholds, wanted)
        for number in wanted:
            count = int(counts[number])
            members = classes.members(number)
            if count > members.count:
                raise malformed(f"{count} of {members.count} members changed")
            stream = self._classes[number]
            assert stream is not None
            places = members.places(self._ranks(stream, count, int(ways[number]), members.count))
            target[places] = stepped(base[places], stream.take_values(count), self._info)
        if not self.num_pieces:
            self._finish()

    def _ranks(self, stream: "_ClassStream", count: int, way: int, num_members: int) -> Places:
        if way == WAY_ALL:
            if count != num_members:
                raise malformed(f"{count} changes for all of {num_members} members")
            return np.arange(num_members)
        if way == WAY_BITMAP:
            return stream.take_bitmap(count, num_members)
        return self._gaps.take(count, num_members)

    def _finish(self) -> None:
        if any(stream is not None and stream.has_bitmaps_left for stream in self._classes):
            raise malformed("bitmaps are longer than their classes")


class _ClassStream:
    """Bitmaps and values of one class in a segment."""

    def __init__(self, bitmaps: bytes, values: NDArray[Any]) -> None:
        self._bitmaps = memoryview(bitmaps)
        self._values = values
        self._next = 0

    @property
    def has_bitmaps_left(self) -> bool:
        """True where bytes remain."""
        return len(self._bitmaps) > 0

    def take_values(self, count: int) -> Bits:
        """The next `count`; there are as many as all parts have."""
        self._next += count
        return self._values[self._next - count : self._next]

    def take_bitmap(self, count: int, num_members: int) -> Places:
        """Ranks in the next bitmap. Raises Malformed."""
        size = -(-num_members // 8)
        if size > len(self._bitmaps):
            raise malformed("bitmap is shorter than its class")
        bits = np.unpackbits(np.frombuffer(self._bitmaps[:size], np.uint8), bitorder="little").view(np.bool_)
        self._bitmaps = self._bitmaps[size:]
        ranks = np.flatnonzero(bits)
        if len(ranks) != count or ranks[-1] >= num_members:
            raise malformed(f"bitmap of {len(ranks)} changes, expected {count}")
        return ranks
