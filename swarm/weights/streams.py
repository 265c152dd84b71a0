"""Byte streams of a payload: zstd where that is smaller, lengths in front, read back within bounds.

Invariant: nothing is allocated for a stream before its declared length was compared with what its reader can use.

Layout of a stream: plain length u32, packed length u32 (0: stored plain), bytes. Little-endian.
"""

import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Final

import zstandard

from swarm.weights.refuse import Malformed, UnusableReason, malformed

_HEAD: Final = struct.Struct("<II")
_LEVEL: Final = 1  # the streams are residuals: what matters is the entropy stage, which all levels share


class _Local(threading.local):
    """zstd contexts of a thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Local()


def pack(data: bytes) -> bytes:
    """One stream."""
    packed = _zstd.compressor.compress(data) if len(data) > 16 else data
    if len(packed) >= len(data):
        return _HEAD.pack(len(data), 0) + data
    return _HEAD.pack(len(data), len(packed)) + packed


class StreamReader:
    """Reads numbers and streams off a sequence of buffers (chunks as they arrive), never ahead of what is asked for."""

    def __init__(self, buffers: Iterable[bytes | memoryview]) -> None:
        self._buffers: Iterator[bytes | memoryview] = iter(buffers)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytes:
        """The next `size` bytes. Raises Malformed at the end; the size must have been bounded by the caller."""
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
        """Fills `target`, which the caller had reason to allocate. Raises Malformed at the end."""
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
        """The fields of a struct."""
        return layout.unpack(self.take(layout.size))

    def stream(self, min_bytes: int, max_bytes: int) -> bytes:
        """A stream of at least and at most so many plain bytes. Raises Malformed."""
        plain_bytes, packed_bytes = self.numbers(_HEAD)
        if plain_bytes > max_bytes:
            raise Malformed(UnusableReason.TOO_LARGE, f"stream of {plain_bytes} bytes exceeds {max_bytes}")
        if plain_bytes < min_bytes:
            raise malformed(f"stream of {plain_bytes} bytes, expected {min_bytes}")
        if not packed_bytes:
            return self.take(plain_bytes)
        if packed_bytes >= plain_bytes:
            raise malformed(f"stream of {plain_bytes} bytes takes {packed_bytes} packed")
        return _unpacked(self.take(packed_bytes), plain_bytes)

    def end(self) -> None:
        """Raises Malformed where bytes are left."""
        left = self._rest or next(self._buffers, b"")
        if len(left):
            raise malformed(f"{len(left)} bytes follow the payload")


def _unpacked(packed: bytes, plain_bytes: int) -> bytes:
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
