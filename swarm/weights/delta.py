"""The lossless patch between two versions of the same tensors.

Invariant: memory is bounded by one tensor and one segment (about 2^21 changes) on both sides, whatever a patch claims.

A tensor is cut into pieces of 2^20 weights, in order of dtype, then name; `segment` codes pieces.

Layout: for each dtype the thresholds of place classes and of value contexts (count u8, exponents u16 each), then its
segments.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from swarm.weights.classes import Tables, choose_tables
from swarm.weights.refuse import malformed
from swarm.weights.segment import PIECE, SegmentReader, SegmentWriter
from swarm.weights.streams import StreamReader
from swarm.weights.tensors import DTYPES, Bits, DtypeInfo, HostTensor, TensorSpec, Weights, specs_of

_SAMPLE: Final = 1 << 14  # weights of a slice that tables are chosen by
_SAMPLED: Final = 1 << 21  # and about how many in all
_MAX_THRESHOLDS: Final = 63


def encode_delta(base: Weights, target: Weights) -> Iterator[bytes]:
    """The payload that turns `base` into `target`.

    Raises:
        ValueError: names, dtypes or shapes differ.
    """
    specs = specs_of(target)
    if specs_of(base) != specs:
        raise ValueError("a delta needs equal names, dtypes and shapes; publish the version in full")
    for _, same in _by_dtype(specs):
        tables = _sampled_tables(base, target, same)
        yield _pack_thresholds(tables.place_thresholds, tables.info) + _pack_thresholds(
            tables.value_thresholds, tables.info
        )
        segment = SegmentWriter(tables)
        for spec in same:
            old, new = base[spec.name].bits, target[spec.name].bits
            for start in range(0, spec.num_elements, PIECE):
                segment.add(old[start : start + PIECE], new[start : start + PIECE])
                if segment.is_full:
                    yield segment.packed()
                    segment = SegmentWriter(tables)
        if segment.num_pieces:
            yield segment.packed()


def decode_delta(base: Weights, buffers: Iterable[bytes | memoryview]) -> Iterator[HostTensor]:
    """The target's tensors, one by one in order of dtype and name; each is a copy, `base` stays as it is.

    Raises:
        Malformed: the payload is none for these specs.
    """
    reader = StreamReader(buffers)
    for dtype, same in _by_dtype(specs_of(base)):
        info = DTYPES[dtype]
        tables = Tables(info, _read_thresholds(reader, info), _read_thresholds(reader, info))
        left = sum(-(-spec.num_elements // PIECE) for spec in same)
        segment: SegmentReader | None = None
        for spec in same:
            old = base[spec.name].bits
            new = old.copy()
            for start in range(0, spec.num_elements, PIECE):
                if segment is None or not segment.num_pieces:
                    segment = SegmentReader(reader, tables, left)
                    left -= segment.num_pieces
                segment.apply(old[start : start + PIECE], new[start : start + PIECE])
            yield HostTensor(spec=spec, bits=new)
    reader.end()


def _by_dtype(specs: Iterable[TensorSpec]) -> list[tuple[str, list[TensorSpec]]]:
    """Specs of each dtype, both in order of name."""
    ordered = sorted(specs, key=lambda spec: (spec.dtype, spec.name))
    return [(dtype, list(same)) for dtype, same in groupby(ordered, key=lambda spec: spec.dtype)]


def _sampled_tables(base: Weights, target: Weights, specs: list[TensorSpec]) -> Tables:
    """Chosen from slices at even distances over all tensors of a dtype."""
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
    return choose_tables(samples, specs[0].info, total / max(1, num_sampled))


def _pack_thresholds(thresholds: tuple[int, ...], info: DtypeInfo) -> bytes:
    exponents = [threshold >> (info.mantissa_bits or 0) for threshold in thresholds]
    return struct.pack(f"<B{len(exponents)}H", len(exponents), *exponents)


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
