"""Byte streams of a payload, and small unsigned numbers packed into bits or byte planes.

Invariant: nothing is allocated for a stream before its declared length was compared with what its reader can use;
unpacking what was packed gives it back, and a packed length follows from count and width alone.

Layout of a stream: plain length u32, packed length u32 (0: stored plain), bytes (one zstd frame unless plain).
Little-endian.
"""

import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm.weights.unusable import MalformedPayload, UnusableReason, malformed

Numbers = NDArray[Any]  # unsigned

_HEAD: Final = struct.Struct("<II")
_LEVEL: Final = 1  # the streams are residuals: what matters is the entropy stage, which all levels share


class _Local(threading.local):
    """zstd contexts of one thread: making one costs more than using it on a small stream."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Local()


def pack(data: bytes) -> bytes:
    """A stream of `data`, compressed where that is smaller."""
    packed = _zstd.compressor.compress(data) if len(data) > 16 else data
    if len(packed) >= len(data):
        return _HEAD.pack(len(data), 0) + data
    return _HEAD.pack(len(data), len(packed)) + packed


class StreamReader:
    """Reads numbers and streams from a sequence of buffers (chunks as they arrive), never ahead of what is needed."""

    def __init__(self, buffers: Iterable[bytes | memoryview]) -> None:
        self._buffers: Iterator[bytes | memoryview] = iter(buffers)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytes:
        """The next `size` bytes, which the caller has bounded. Raises MalformedPayload where the payload ends early."""
        if size <= len(self._rest):
            taken, self._rest = self._rest[:size], self._rest[size:]
            return bytes(taken)
        parts = [self._rest]
        missing = size - len(self._rest)
        while missing > 0:
            buffer = memoryview(next(self._buffers, b""))
            if not len(buffer):
                raise malformed(f"payload ends {missing} bytes early")
            parts.append(buffer[:missing])
            self._rest = buffer[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def into(self, target: memoryview) -> None:
        """Fills `target`, which the caller has bounded. Raises MalformedPayload where the payload ends early."""
        filled = 0
        while filled < len(target):
            if not len(self._rest):
                self._rest = memoryview(next(self._buffers, b""))
                if not len(self._rest):
                    raise malformed(f"payload ends {len(target) - filled} bytes early")
            part = self._rest[: len(target) - filled]
            target[filled : filled + len(part)] = part
            self._rest = self._rest[len(part) :]
            filled += len(part)

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        """The fields of a struct. Raises MalformedPayload where the payload ends early."""
        return layout.unpack(self.take(layout.size))

    def stream(self, min_bytes: int, max_bytes: int) -> bytes:
        """The plain bytes of the next stream. Raises MalformedPayload outside [min_bytes, max_bytes]."""
        plain_bytes, packed_bytes = self.numbers(_HEAD)
        if plain_bytes > max_bytes:
            raise MalformedPayload(UnusableReason.TOO_LARGE, f"stream of {plain_bytes} bytes exceeds {max_bytes}")
        if plain_bytes < min_bytes:
            raise malformed(f"stream of {plain_bytes} bytes, expected {min_bytes}")
        if not packed_bytes:
            return self.take(plain_bytes)
        if packed_bytes >= plain_bytes:
            raise malformed(f"stream of {plain_bytes} bytes takes {packed_bytes} packed")
        return _decompress(self.take(packed_bytes), plain_bytes)

    def end(self) -> None:
        """Raises MalformedPayload where bytes are left."""
        left = self._rest or next(self._buffers, b"")
        if len(left):
            raise malformed(f"{len(left)} bytes follow the payload")


def _decompress(packed: bytes, plain_bytes: int) -> bytes:
    """Exactly one zstd frame. A frame that announces another size is refused before it is given memory."""
    try:
        if zstandard.frame_content_size(packed) != plain_bytes:
            raise malformed("zstd frame announces another size")
        plain = _zstd.decompressor.decompress(packed, max_output_size=plain_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed(f"zstd: {error}") from None
    if len(plain) != plain_bytes:
        raise malformed(f"stream has {len(plain)} bytes, expected {plain_bytes}")
    return plain


# --- bits and byte planes ----------------------------------------------------------------------


def packed_size(count: int, width: int) -> int:
    """Bytes that `count` numbers of `width` bits take."""
    return -(-count * width // 8)


def pack_bits(numbers: Numbers, width: int) -> bytes:
    """The low `width` bits of each number (up to 32), one after the other."""
    if width in (1, 2, 4):
        per_byte = 8 // width
        padded = np.zeros(-(-len(numbers) // per_byte) * per_byte, np.uint8)
        padded[: len(numbers)] = numbers
        columns = padded.reshape(-1, per_byte)
        packed = columns[:, 0].copy()
        for index in range(1, per_byte):
            packed |= columns[:, index] << np.uint8(width * index)
        return packed.tobytes()
    if width == 8:
        return numbers.astype(np.uint8).tobytes()
    shifts = np.arange(width, dtype=np.uint32)
    bits = (numbers.astype(np.uint32)[:, None] >> shifts) & np.uint32(1)
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack_bits(data: bytes, count: int, width: int) -> Numbers:
    """[count] numbers of the narrowest dtype; `data` has packed_size(count, width) bytes."""
    packed = np.frombuffer(data, np.uint8)
    if width == 8:
        return packed
    if width in (1, 2, 4):
        per_byte = 8 // width
        columns = np.empty((len(packed), per_byte), np.uint8)
        for index in range(per_byte):
            columns[:, index] = (packed >> np.uint8(width * index)) & np.uint8((1 << width) - 1)
        return columns.reshape(-1)[:count]
    bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    numbers = np.zeros(count, np.uint32)
    for index in range(width):
        numbers |= bits[:, index].astype(np.uint32) << np.uint32(index)
    return numbers


def pack_planes(numbers: Numbers) -> list[bytes]:
    """Byte planes: the lowest byte of all numbers, then the next one, up to the width of their dtype."""
    planes = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), numbers.dtype.itemsize)
    return [planes[:, index].tobytes() for index in range(numbers.dtype.itemsize)]


def unpack_planes(planes: list[bytes], dtype: np.dtype[Any]) -> Numbers:
    """The inverse of `pack_planes`."""
    count = len(planes[0])
    columns = np.empty((count, dtype.itemsize), np.uint8)
    for index, plane in enumerate(planes):
        columns[:, index] = np.frombuffer(plane, np.uint8)
    return columns.reshape(-1).view(dtype)
