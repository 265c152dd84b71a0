"""Ulp deltas: the number of representable values by which a weight moved, as a small unsigned number; their encoding.

Invariant: a bijection on bit patterns. Every pattern, NaN payloads and both zeros included, has its own index in one
order, and a delta wraps around, so base plus delta is the target bit for bit. The encoding is chosen from the numbers
alone and stated in the byte before them.

Floating-point patterns are ordered by value: as signed integers, negative ones with flipped magnitude. A delta counts
away from zero, so it has the same sign for a weight and its mirror image; growing weights keep growing, so this codes
better than the plain sign. The size of an optimizer step in ulps follows from a weight's exponent, so the numbers of
each exponent class are encoded separately.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.payload import (
    Numbers,
    StreamReader,
    malformed,
    pack,
    pack_bits,
    pack_planes,
    packed_size,
    unpack_bits,
    unpack_planes,
)
from swarm.weights.tensors import Bits, DtypeInfo

Signed = NDArray[Any]  # 1-D signed integers as wide as the dtype


def ulp_deltas(base: Bits, target: Bits, info: DtypeInfo) -> Bits:
    """Changes as small unsigned numbers: 0 for one ulp towards zero, 1 for one away, 2 for two towards, ...

    Args:
        base, target: [n] bit patterns that differ everywhere.
    """
    signed, top_bit = _signed(base, info), 8 * info.size - 1
    difference = _ordered(_signed(target, info), info)
    difference -= _ordered(signed, info)
    _negate_where_negative(difference, signed, info)
    # Zigzag: 2 d for d > 0, -2 d - 1 for d < 0; 0 does not occur, so everything moves down by one.
    numbers = difference << 1
    numbers ^= difference >> top_bit
    numbers -= 1
    return numbers.view(info.bits_dtype)


def add_ulp_deltas(base: Bits, changes: Bits, info: DtypeInfo) -> Bits:
    """The targets: the inverse of `ulp_deltas`."""
    signed = _signed(base, info)
    raised = changes + info.bits_dtype.type(1)
    difference = _signed(raised >> 1, info)
    difference ^= -_signed(raised & 1, info)
    _negate_where_negative(difference, signed, info)
    difference += _ordered(signed, info)
    return _ordered(difference, info).view(info.bits_dtype)


def magnitudes(bits: Bits, info: DtypeInfo, out: Bits) -> Bits:
    """Bit patterns without the sign bit, written to `out`; those of floats are ordered by absolute value."""
    return np.bitwise_and(bits, info.bits_dtype.type((1 << (8 * info.size - 1)) - 1), out=out)


def _signed(bits: Bits, info: DtypeInfo) -> Signed:
    return bits.view(np.dtype(f"<i{info.size}"))


def _ordered(patterns: Signed, info: DtypeInfo) -> Signed:
    """Maps bit patterns to indices in the order of values, in a new array; the map is its own inverse."""
    if info.mantissa_bits is None:
        return patterns.copy()
    flips = patterns >> (8 * info.size - 1)
    flips &= patterns.dtype.type((1 << (8 * info.size - 1)) - 1)
    flips ^= patterns
    return flips


def _negate_where_negative(difference: Signed, base: Signed, info: DtypeInfo) -> None:
    """Negates, in place, the differences whose base is negative."""
    if info.is_signed:
        sign = base >> (8 * info.size - 1)
        difference ^= sign
        difference -= sign


# --- encoding ----------------------------------------------------------------------------------


# First byte of an encoding: byte planes, or a width in bits, perhaps with escapes.
ENCODING_PLANES: Final = 0
ENCODING_ESCAPES: Final = 0x80  # flag: the largest number of that width stands for a wider one, which follows
_WIDTHS: Final = (1, 2, 4, 8)
_SAMPLE: Final = 1 << 13  # sampled numbers by which an encoding is chosen


class UlpWriter:
    """Collects the ulp deltas of a segment, by class."""

    def __init__(self, num_classes: int) -> None:
        self._numbers: list[list[Numbers]] = [[] for _ in range(num_classes)]

    def add(self, numbers: Numbers, counts: Sequence[int]) -> None:
        """Adds the deltas of a piece, `counts[c]` of class c, one class after another."""
        start = 0
        for mine, count in zip(self._numbers, counts, strict=True):
            if count:
                mine.append(numbers[start : start + count])
                start += count

    def to_bytes(self) -> bytes:
        """The encoded deltas of each class with deltas, concatenated in order of class."""
        return b"".join(pack_ulps(np.concatenate(mine)) for mine in self._numbers if mine)


class UlpReader:
    """Reads the ulp deltas of a segment."""

    def __init__(self, reader: StreamReader, counts: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Reads all deltas, `counts[c]` of class c. Raises MalformedPayload."""
        self._numbers = [read_ulps(reader, count, dtype) if count else np.zeros(0, dtype) for count in counts]

    def take(self, counts: Sequence[int]) -> Numbers:
        """The deltas of the next piece, class by class; `counts` of all pieces add up to the reader's counts."""
        parts: list[Numbers] = []
        for number, count in enumerate(counts):
            if count:
                mine = self._numbers[number]
                parts.append(mine[:count])
                self._numbers[number] = mine[count:]
        return np.concatenate(parts)


def pack_ulps(numbers: Numbers) -> bytes:
    """[n > 0] unsigned ulp deltas in the encoding that is smallest for a sample of them."""
    sample = numbers[:: -(-len(numbers) // _SAMPLE)]
    best = min(_encodings_of(numbers), key=lambda encoding: len(_encode(sample, encoding)))
    return _encode(numbers, best)


def _encodings_of(numbers: Numbers) -> list[int]:
    """Candidates: the width that fits all numbers, widths that fit three quarters (with escapes), and byte planes."""
    largest = int(numbers.max())
    fitting = [width for width in _WIDTHS if largest < 1 << width][:1]
    escaping = [
        width | ENCODING_ESCAPES
        for width in _WIDTHS[1:]
        if width < (fitting or [64])[0] and np.count_nonzero(numbers >= (1 << width) - 1) * 4 < len(numbers)
    ]
    return [*fitting, *escaping, ENCODING_PLANES]


def _encode(numbers: Numbers, encoding: int) -> bytes:
    if encoding == ENCODING_PLANES:
        return bytes([encoding]) + b"".join(pack(plane) for plane in pack_planes(numbers))
    width = encoding & ~ENCODING_ESCAPES
    if not encoding & ENCODING_ESCAPES:
        return bytes([encoding]) + pack(pack_bits(numbers, width))
    escape = (1 << width) - 1
    rest = numbers[numbers >= escape]
    narrow = pack_bits(np.minimum(numbers, numbers.dtype.type(escape)), width)
    return bytes([encoding]) + pack(narrow) + b"".join(pack(plane) for plane in pack_planes(rest))


def read_ulps(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Numbers:
    """[count] numbers of an unsigned dtype. Raises MalformedPayload."""
    encoding = reader.take(1)[0]
    if encoding == ENCODING_PLANES:
        return unpack_planes([reader.stream(count, count) for _ in range(dtype.itemsize)], dtype)
    width = encoding & ~ENCODING_ESCAPES
    if width not in _WIDTHS or width > 8 * dtype.itemsize:
        raise malformed(f"unknown encoding {encoding} of ulp deltas")
    size = packed_size(count, width)
    numbers = unpack_bits(reader.stream(size, size), count, width).astype(dtype)
    if encoding & ENCODING_ESCAPES:
        is_wide = numbers == (1 << width) - 1
        num_wide = int(np.count_nonzero(is_wide))
        planes = [reader.stream(num_wide, num_wide) for _ in range(dtype.itemsize)]
        numbers[is_wide] = unpack_planes(planes, dtype)
    return numbers
