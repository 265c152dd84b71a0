"""Small unsigned numbers, several to a byte or several bytes to a number.

Invariant: unpacking what was packed gives it back; a packed length follows from count and width alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]  # unsigned


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack_bits(numbers: Numbers, width: int) -> bytes:
    """The low `width` bits of each number (up to 32), one after the other."""
    if width in (1, 2, 4):
        per_byte = 8 // width
        padded = np.zeros(-(-len(numbers) // per_byte) * per_byte, np.uint8)
        padded[: len(numbers)] = numbers
        columns = padded.reshape(-1, per_byte)
        packed = columns[:, 0].copy()
        for place in range(1, per_byte):
            packed |= columns[:, place] << np.uint8(width * place)
        return packed.tobytes()
    if width == 8:
        return numbers.astype(np.uint8).tobytes()
    places = np.arange(width, dtype=np.uint32)
    bits = (numbers.astype(np.uint32)[:, None] >> places) & np.uint32(1)
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack_bits(data: bytes, count: int, width: int) -> Numbers:
    """[count] numbers of the narrowest dtype; `data` has packed_size(count, width) bytes."""
    packed = np.frombuffer(data, np.uint8)
    if width == 8:
        return packed
    if width in (1, 2, 4):
        per_byte = 8 // width
        columns = np.empty((len(packed), per_byte), np.uint8)
        for place in range(per_byte):
            columns[:, place] = (packed >> np.uint8(width * place)) & np.uint8((1 << width) - 1)
        return columns.reshape(-1)[:count]
    bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    numbers = np.zeros(count, np.uint32)
    for place in range(width):
        numbers |= bits[:, place].astype(np.uint32) << np.uint32(place)
    return numbers


def pack_planes(numbers: Numbers) -> list[bytes]:
    """The lowest byte of all numbers, then the next one, up to the width of their dtype."""
    planes = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), numbers.dtype.itemsize)
    return [planes[:, place].tobytes() for place in range(numbers.dtype.itemsize)]


def unpack_planes(planes: list[bytes], dtype: np.dtype[Any]) -> Numbers:
    """What `pack_planes` was given."""
    count = len(planes[0])
    columns = np.empty((count, dtype.itemsize), np.uint8)
    for place, plane in enumerate(planes):
        columns[:, place] = np.frombuffer(plane, np.uint8)
    return columns.reshape(-1).view(dtype)
