"""Payload of a version as untrusted bytes: reasons to refuse one, chunks, and streams.

Invariant: inside this package hostile bytes raise `MalformedPayload` and nothing else; `open_manifest` and `stage`
return an `Unusable`. A chunk is yielded only after its length and digest were compared with the manifest. Nothing
is allocated for a stream before its declared length was compared with what its reader can use; a packed length follows
from count and width alone.

Layout of a stream: plain length u32, packed length u32 (0: stored plain), bytes (one zstd frame unless plain).
Little-endian.
"""

import hashlib
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm.types import Digest, short

CHUNK_BYTES: Final = 1 << 20


class UnusableReason(StrEnum):
    """Reason for not using a version from a peer; counted."""

    TOO_LARGE = "too_large"  # a size over its bound, before anything was allocated for it
    MALFORMED = "malformed"  # structure of a manifest or payload
    WRONG_SIGNATURE = "wrong_signature"
    WRONG_OWNER = "wrong_owner"  # not signed by the lineage's owner
    WRONG_CHUNK = "wrong_chunk"  # length or digest differs from the manifest, or a chunk is missing
    WRONG_BASE = "wrong_base"  # we hold other weights than the patch starts from
    WRONG_LAYOUT = "wrong_layout"  # names, dtypes or shapes differ from the manifest's layout
    WRONG_TENSOR = "wrong_tensor"  # a decoded tensor has another hash
    WRONG_TARGET = "wrong_target"  # the decoded whole has another digest
    NOT_FINITE = "not_finite"  # a decoded tensor has an infinity or NaN, with which nothing can be generated


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """Refusal of a manifest, chunk or version: counted data, not an exception."""

    reason: UnusableReason
    detail: str  # values and bounds, for the log


class MalformedPayload(Exception):
    """Error for unusable bytes of a manifest or payload; the package's entry points return it as an `Unusable`."""

    def __init__(self, reason: UnusableReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    def unusable(self) -> Unusable:
        """The refusal as a value, for callers outside this package."""
        return Unusable(reason=self.reason, detail=self.detail)


def malformed(detail: str) -> MalformedPayload:
    """A `MalformedPayload` with the reason MALFORMED."""
    return MalformedPayload(UnusableReason.MALFORMED, detail)


# --- chunks -----------------------------------------------------------------------------------


def chunk_digest(chunk: bytes | memoryview) -> Digest:
    """SHA-256 of a chunk, its address."""
    return hashlib.sha256(chunk).digest()


def split_chunks(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Splits a payload into chunks of CHUNK_BYTES; the last one may be shorter."""
    held = bytearray()
    for part in parts:
        view = memoryview(part)
        while len(view):
            taken = view[: CHUNK_BYTES - len(held)]
            held += taken
            view = view[len(taken) :]
            if len(held) == CHUNK_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def num_chunks(payload_bytes: int) -> int:
    """Number of chunks of a payload."""
    return -(-payload_bytes // CHUNK_BYTES)


def check_chunk(number: int, chunk: bytes | memoryview, digests: tuple[Digest, ...], payload_bytes: int) -> None:
    """Raises MalformedPayload unless a chunk has the length and digest of chunk `number` of the payload."""
    expected = min(CHUNK_BYTES, payload_bytes - number * CHUNK_BYTES)
    if len(chunk) != expected:
        raise MalformedPayload(
            UnusableReason.WRONG_CHUNK, f"chunk {number} has {len(chunk)} bytes, expected {expected}"
        )
    if chunk_digest(chunk) != digests[number]:
        raise MalformedPayload(UnusableReason.WRONG_CHUNK, f"chunk {number} is not {short(digests[number])}")


def check_chunks(
    chunks: Iterable[bytes | memoryview], digests: tuple[Digest, ...], payload_bytes: int
) -> Iterator[bytes | memoryview]:
    """Yields the chunks of a payload, each once checked. Raises MalformedPayload at a wrong, missing or extra chunk."""
    number = 0
    for chunk in chunks:
        if number == len(digests):
            raise MalformedPayload(UnusableReason.WRONG_CHUNK, f"more than {number} chunks")
        check_chunk(number, chunk, digests, payload_bytes)
        number += 1
        yield chunk
    if number < len(digests):
        raise MalformedPayload(UnusableReason.WRONG_CHUNK, f"{number} of {len(digests)} chunks")


# --- streams ----------------------------------------------------------------------------------


Numbers = NDArray[Any]  # unsigned

_HEAD: Final = struct.Struct("<II")
_LEVEL: Final = 1  # the streams are residuals, and all levels share the entropy stage that matters for them


class _Local(threading.local):
    """zstd contexts of one thread: creating one costs more than a small stream."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Local()


def pack(data: bytes) -> bytes:
    """The stream of `data` (see the layout above), compressed if that is smaller."""
    packed = _zstd.compressor.compress(data) if len(data) > 16 else data
    if len(packed) >= len(data):
        return _HEAD.pack(len(data), 0) + data
    return _HEAD.pack(len(data), len(packed)) + packed


class StreamReader:
    """Reads numbers and streams from buffers (chunks as they arrive); takes a buffer only when it is needed."""

    def __init__(self, buffers: Iterable[bytes | memoryview]) -> None:
        self._buffers: Iterator[bytes | memoryview] = iter(buffers)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytes:
        """The next `size` bytes; the caller bounds `size`. Raises MalformedPayload if the payload ends early."""
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
        """Fills `target` with the next bytes. Raises MalformedPayload if the payload ends early."""
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
        """Reads the fields of the next struct. Raises MalformedPayload if the payload ends early."""
        return layout.unpack(self.take(layout.size))

    def stream(self, min_bytes: int, max_bytes: int) -> bytes:
        """The plain bytes of the next stream. Raises MalformedPayload if damaged or not min_bytes to max_bytes long."""
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
        """Raises MalformedPayload if bytes are left."""
        left = self._rest or next(self._buffers, b"")
        if len(left):
            raise malformed(f"{len(left)} bytes follow the payload")


def _decompress(packed: bytes, plain_bytes: int) -> bytes:
    """Content of exactly one zstd frame. A frame that announces another size is refused before any allocation."""
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
    """Bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack_bits(numbers: Numbers, width: int) -> bytes:
    """Numbers below 2^width concatenated at `width` bits each (1 to 32), lowest bit first."""
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
    """[count] numbers, uint8 or uint32, from the packed_size(count, width) bytes of `pack_bits`."""
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
