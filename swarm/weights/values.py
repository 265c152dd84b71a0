"""By how much changed weights changed: few bits each, and byte planes for what does not fit.

A number's context is its weight's exponent in the base: how many ulps an optimizer step makes follows from that.

Invariant: the width is chosen from the numbers alone and said in front of them; every number comes back.
"""

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.bitpack import Numbers, pack_bits, pack_planes, packed_size, unpack_bits, unpack_planes
from swarm.weights.members import ClassTable, classes_of
from swarm.weights.refuse import malformed
from swarm.weights.streams import StreamReader, pack
from swarm.weights.tensors import Bits, DtypeInfo

_U32: Final = struct.Struct("<I")
_WIDTHS: Final = (1, 2, 4, 8)
_PLANES: Final = 0
_WITH_ESCAPES: Final = 0x80
_TRIED: Final = 1 << 15  # numbers that the width is chosen by


class ValueWriter:
    """Collects the numbers of a segment, by context."""

    def __init__(self, info: DtypeInfo, table: ClassTable, num_contexts: int) -> None:
        self._info = info
        self._table = table
        self._numbers: list[list[Numbers]] = [[] for _ in range(num_contexts)]

    def add(self, base: Bits, numbers: Numbers) -> None:
        """Those of some weights, with the patterns that they have in the base."""
        context = classes_of(base, self._info, self._table)
        ends = np.cumsum(np.bincount(context, minlength=len(self._numbers)))
        ordered = numbers[np.argsort(context, kind="stable")]
        for mine, part in zip(self._numbers, np.split(ordered, ends[:-1]), strict=True):
            if len(part):
                mine.append(part)

    def packed(self) -> bytes:
        """Count (u32) and numbers of each context."""
        parts: list[bytes] = []
        for mine in self._numbers:
            count = sum(map(len, mine))
            parts.append(_U32.pack(count))
            if count:
                parts.append(pack_values(np.concatenate(mine)))
        return b"".join(parts)


class ValueReader:
    """Gives the numbers of a segment back."""

    def __init__(
        self, reader: StreamReader, info: DtypeInfo, table: ClassTable, num_contexts: int, num_changes: int
    ) -> None:
        """Reads all of them; there must be `num_changes`. Raises Malformed."""
        self._info = info
        self._table = table
        self._numbers: list[Numbers] = []
        left = num_changes
        for _ in range(num_contexts):
            (count,) = reader.numbers(_U32)
            left -= count
            if left < 0:
                raise malformed(f"values of more than {num_changes} changes")
            self._numbers.append(read_values(reader, count, info.bits_dtype) if count else np.zeros(0, info.bits_dtype))
        if left:
            raise malformed(f"values of {num_changes - left} changes, expected {num_changes}")

    def take(self, base: Bits) -> Numbers:
        """The numbers of the next weights, which have those patterns in the base. Raises Malformed."""
        context = classes_of(base, self._info, self._table)
        parts: list[Numbers] = []
        for number, count in enumerate(np.bincount(context, minlength=len(self._numbers)).tolist()):
            mine = self._numbers[number]
            if count > len(mine):
                raise malformed(f"context {number} lacks {count - len(mine)} values")
            parts.append(mine[:count])
            self._numbers[number] = mine[count:]
        numbers = np.empty(len(base), base.dtype)
        numbers[np.argsort(context, kind="stable")] = np.concatenate(parts)
        return numbers


def pack_values(numbers: Numbers) -> bytes:
    """All of them, in the smallest of the ways to write them.

    Args:
        numbers: [n] unsigned, n > 0.
    """
    sample = numbers[:: -(-len(numbers) // _TRIED)]
    best = min(_ways(numbers), key=lambda way: len(_packed(sample, way)))
    return _packed(numbers, best)


def _ways(numbers: Numbers) -> list[int]:
    """Widths that hold all numbers, widths with escapes that hold most, and planes."""
    largest = int(numbers.max())
    fitting = [width for width in _WIDTHS if largest < 1 << width][:1]
    escaping = [
        width | _WITH_ESCAPES
        for width in _WIDTHS[1:]
        if width < (fitting or [64])[0] and np.count_nonzero(numbers >= (1 << width) - 1) * 4 < len(numbers)
    ]
    return [*fitting, *escaping, _PLANES]


def _packed(numbers: Numbers, way: int) -> bytes:
    if way == _PLANES:
        return bytes([way]) + b"".join(pack(plane) for plane in pack_planes(numbers))
    width = way & ~_WITH_ESCAPES
    if not way & _WITH_ESCAPES:
        return bytes([way]) + pack(pack_bits(numbers, width))
    escape = (1 << width) - 1
    rest = numbers[numbers >= escape]
    narrow = pack_bits(np.minimum(numbers, numbers.dtype.type(escape)), width)
    return bytes([way]) + pack(narrow) + b"".join(pack(plane) for plane in pack_planes(rest))


def read_values(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """[count] numbers of an unsigned dtype. Raises Malformed."""
    way = reader.take(1)[0]
    if way == _PLANES:
        return unpack_planes([reader.stream(count, count) for _ in range(dtype.itemsize)], dtype)
    width = way & ~_WITH_ESCAPES
    if width not in _WIDTHS or width > 8 * dtype.itemsize:
        raise malformed(f"unknown way {way} of writing values")
    size = packed_size(count, width)
    numbers = unpack_bits(reader.stream(size, size), count, width).astype(dtype)
    if way & _WITH_ESCAPES:
        is_wide = numbers == (1 << width) - 1
        num_wide = int(is_wide.sum())
        planes = [reader.stream(num_wide, num_wide) for _ in range(dtype.itemsize)]
        numbers[is_wide] = unpack_planes(planes, dtype)
    return numbers
