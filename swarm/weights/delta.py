"""Lossless patch (delta) between two versions of the same tensors: encode, decode, and estimate its size.

Invariant: whatever a patch claims, memory is bounded by one segment (about 2^21 changes). Decoding also holds one
tensor, or one block of small tensors, that the caller has not taken yet.

Tensors are coded in order of dtype, then name: small neighbours share a piece, large tensors are split into pieces of
2^20 weights, and `segment` codes pieces.

Layout: for each dtype the thresholds of its classes (count u8, exponents u16), then its segments.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from swarm.weights.exponent_classes import MAX_CLASSES, ExponentClasses, choose_classes
from swarm.weights.payload import StreamReader, malformed
from swarm.weights.segment import PIECE, SegmentReader, SegmentWriter
from swarm.weights.tensors import DTYPES, Bits, DtypeInfo, HostTensor, TensorSpec, Weights, part_of, specs_of

_SLICE: Final = 1 << 13  # weights of a sampled slice
_SAMPLED: Final = 1 << 20  # approximate number of sampled weights
_BLOCK: Final = 1 << 24  # weights that share a block of memory when decoded


@dataclass(frozen=True, slots=True)
class SampledChanges:
    """Exponent classes and estimated size of a patch, from a sample of the weights."""

    classes: tuple[ExponentClasses, ...]  # of each dtype, in order
    num_bytes: float


def sample_changes(base: Weights, target: Weights) -> SampledChanges:
    """Samples evenly spaced slices of all tensors. Raises ValueError if names, dtypes or shapes differ."""
    specs = specs_of(target)
    if specs_of(base) != specs:
        raise ValueError("a delta needs equal names, dtypes and shapes; publish the version in full")
    samples = [_sample(base, target, same) for _, same in _by_dtype(specs)]
    return SampledChanges(tuple(classes for classes, _ in samples), sum(bits for _, bits in samples) / 8)


def encode_delta(base: Weights, target: Weights, sampled: SampledChanges | None = None) -> Iterator[bytes]:
    """Yields the payload that turns `base` into `target`. Raises ValueError if names, dtypes or shapes differ.

    Args:
        sampled: from `sample_changes` of the same two versions; None: this function samples.
    """
    sampled = sampled or sample_changes(base, target)
    for classes, (_, same) in zip(sampled.classes, _by_dtype(specs_of(target)), strict=True):
        yield _pack_thresholds(classes)
        segment = SegmentWriter(classes)
        for group in _groups(same):
            for part in _pieces(group):
                segment.add(_bits_of(base, group, part), _bits_of(target, group, part))
                if segment.is_full:
                    yield segment.to_bytes()
                    segment = SegmentWriter(classes)
        if segment.num_pieces:
            yield segment.to_bytes()


def decode_delta(base: Weights, buffers: Iterable[bytes | memoryview]) -> Iterator[HostTensor]:
    """Yields the target's tensors in order of dtype and name, in new memory that neighbours may share.

    Raises:
        MalformedPayload: the payload does not fit the specs of `base`.
    """
    reader = StreamReader(buffers)
    for dtype, same in _by_dtype(specs_of(base)):
        classes = ExponentClasses(DTYPES[dtype], _read_thresholds(reader, DTYPES[dtype]))
        groups = _groups(same)
        left = sum(len(_pieces(group)) for group in groups)
        memory = _Memory(DTYPES[dtype], _num_elements(same))
        segment: SegmentReader | None = None
        for group in groups:
            new = memory.take(_num_elements(group))
            for part in _pieces(group):
                if segment is None or not segment.num_pieces:
                    segment = SegmentReader(reader, classes, left)
                    left -= segment.num_pieces
                piece = new[part]
                _copy_bits(base, group, part, piece)
                segment.apply(piece)
            yield from _split(group, new)
    reader.end()


def _by_dtype(specs: Iterable[TensorSpec]) -> list[tuple[str, list[TensorSpec]]]:
    """(dtype, specs of the dtype) in order of dtype, then name."""
    ordered = sorted(specs, key=lambda spec: (spec.dtype, spec.name))
    return [(dtype, list(same)) for dtype, same in groupby(ordered, key=lambda spec: spec.dtype)]


# --- pieces ------------------------------------------------------------------------------------

Group = list[TensorSpec]  # neighbours that fit a piece together, or one tensor of any size


def _groups(specs: Sequence[TensorSpec]) -> list[Group]:
    groups: list[Group] = []
    room = 0
    for spec in specs:
        if not groups or spec.num_elements > room:
            groups.append([])
            room = PIECE
        groups[-1].append(spec)
        room -= spec.num_elements
    return groups


def _num_elements(group: Group) -> int:
    return sum(spec.num_elements for spec in group)


def _pieces(group: Group) -> list[slice]:
    """Slices of at most PIECE weights; none for a group without weights."""
    total = _num_elements(group)
    return [slice(start, min(start + PIECE, total)) for start in range(0, total, PIECE)]


def _bits_of(weights: Weights, group: Group, part: slice) -> Bits:
    """Bit patterns of one piece; no copy if one tensor on the host holds the piece."""
    if len(group) == 1:
        return part_of(weights, group[0].name, part)
    return np.concatenate([weights[spec.name].bits for spec in group])


def _copy_bits(weights: Weights, group: Group, part: slice, out: Bits) -> None:
    if len(group) == 1:
        out[:] = part_of(weights, group[0].name, part)
    else:
        np.concatenate([weights[spec.name].bits for spec in group], out=out)


def _split(group: Group, bits: Bits) -> Iterator[HostTensor]:
    start = 0
    for spec in group:
        yield HostTensor(spec=spec, bits=bits[start : start + spec.num_elements])
        start += spec.num_elements


class _Memory:
    """Memory for the tensors of a dtype, in blocks large enough for huge pages: page faults cost more than copies."""

    def __init__(self, info: DtypeInfo, num_elements: int) -> None:
        self._block = np.empty(0, info.bits_dtype)
        self._left = num_elements  # not yet taken

    def take(self, count: int) -> Bits:
        """[count] unsigned integers of any content."""
        if count > len(self._block):
            self._block = np.empty(max(count, min(_BLOCK, self._left)), self._block.dtype)
        taken, self._block = self._block[:count], self._block[count:]
        self._left -= count
        return taken


# --- classes -----------------------------------------------------------------------------------


def _sample(base: Weights, target: Weights, specs: list[TensorSpec]) -> tuple[ExponentClasses, float]:
    """Classes for the tensors of a dtype, and the estimated bits of their changes."""
    total = sum(spec.num_elements for spec in specs)
    stride = max(1, total // _SAMPLED) * _SLICE
    old: list[Bits] = []
    new: list[Bits] = []
    passed, wanted = 0, 0
    for spec in specs:
        while wanted < passed + spec.num_elements:
            part = slice(wanted - passed, min(wanted - passed + _SLICE, spec.num_elements))
            old.append(part_of(base, spec.name, part))
            new.append(part_of(target, spec.name, part))
            wanted += stride if len(old[-1]) == _SLICE else len(old[-1])
        passed += spec.num_elements
    info = specs[0].info
    before, after = (np.concatenate([np.zeros(0, info.bits_dtype), *parts]) for parts in (old, new))
    return choose_classes(before, after, info, total / max(1, len(before)))


def _pack_thresholds(classes: ExponentClasses) -> bytes:
    exponents = [threshold >> (classes.info.mantissa_bits or 0) for threshold in classes.thresholds]
    return struct.pack(f"<B{len(exponents)}H", len(exponents), *exponents)


def _read_thresholds(reader: StreamReader, info: DtypeInfo) -> tuple[int, ...]:
    (count,) = reader.take(1)
    if count >= MAX_CLASSES or (count and info.mantissa_bits is None):
        raise malformed(f"{count} thresholds, expected less than {MAX_CLASSES}, and none for integers")
    exponents = reader.numbers(struct.Struct(f"<{count}H"))
    mantissa_bits = info.mantissa_bits or 0
    num_exponents = 1 << (8 * info.size - 1 - mantissa_bits)
    if any(e >= num_exponents for e in exponents) or sorted(set(exponents)) != list(exponents):
        raise malformed("thresholds are not ascending exponents")
    return tuple(exponent << mantissa_bits for exponent in exponents)
