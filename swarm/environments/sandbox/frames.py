"""Frames between the processes of the sandbox: four bytes of length, then the content.

Invariant: a length is compared with its bound before anything of that size is allocated.
"""

import os
from typing import Final

MAX_FRAME_BYTES: Final = 64 * 2**20


def read_frame(source: int, most_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Reads a frame from a file descriptor; b"" at end of file. Exits if the frame is longer than `most_bytes`."""
    size = int.from_bytes(_read_exactly(source, 4))
    if size > most_bytes:
        raise SystemExit(3)
    return _read_exactly(source, size)


def write_frame(sink: int, frame: bytes) -> None:
    """Writes a frame to a file descriptor. Raises OSError."""
    data = memoryview(len(frame).to_bytes(4) + frame)
    while data:
        data = data[os.write(sink, data) :]


def _read_exactly(source: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = os.read(source, min(size, 2**20))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
