"""By how much changed weights changed: few bits each, and byte planes for what does not fit.

How many ulps an optimizer step makes follows from a weight's exponent, so the numbers of each class are written apart.

Invariant: the width is chosen from the numbers alone and said in front of them; every number comes back.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from swarm.weights.bitpack import Numbers, pack_bits, pack_planes, packed_size, unpack_bits, unpack_planes
from swarm.weights.refuse import malformed
from swarm.weights.streams import StreamReader, pack

_WIDTHS: Final = (1, 2, 4, 8)
_PLANES: Final = 0
_WITH_ESCAPES: Final = 0x80
_TRIED: Final = 1 << 13  # numbers that the width is chosen by


class ValueWriter:
    """Collects the numbers of a segment, by class."""

    def __init__(self, num_classes: int) -> None:
        self._numbers: list[list[Numbers]] = [[] for _ in range(num_classes)]

    def add(self, numbers: Numbers, counts: Sequence[int]) -> None:
        """Those of a piece: so many of each class, one after the other."""
        start = 0
        for mine, count in zip(self._numbers, counts, strict=True):
            if count:
                mine.append(numbers[start : start + count])
                start += count

    def packed(self) -> bytes:
        """The numbers of each class that has some."""
        return b"".join(pack_values(np.concatenate(mine)) for mine in self._numbers if mine)


class ValueReader:
    """Gives the numbers of a segment back."""

    def __init__(self, reader: StreamReader, counts: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Reads all of them: so many of each class. Raises Malformed."""
        self._numbers = [read_values(reader, count, dtype) if count else np.zeros(0, dtype) for count in counts]

    def take(self, counts: Sequence[int]) -> Numbers:
        """Those of the next piece, class by class; in all no more of a class than there are."""
        parts: list[Numbers] = []
        for number, count in enumerate(counts):
            if count:
                mine = self._numbers[number]
                parts.append(mine[:count])
                self._numbers[number] = mine[count:]
        return np.concatenate(parts)


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


def read_values(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Numbers:
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
        num_wide = int(np.count_nonzero(is_wide))
        planes = [reader.stream(num_wide, num_wide) for _ in range(dtype.itemsize)]
        numbers[is_wide] = unpack_planes(planes, dtype)
    return numbers
