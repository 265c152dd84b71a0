"""Bounded reads of files from untrusted sources, whole or from the end.

Invariant: a read takes at most as many bytes as its caller allows, and waits for no pipe and no device.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Reads a whole regular file.

    Raises:
        OSError: the file cannot be read, or is missing.
        ValueError: it is no regular file, or longer than `max_bytes`.
    """
    with _open(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path.name} is longer than {max_bytes} bytes")
    return data


def read_json(path: Path, max_bytes: int) -> Any:
    """Reads a JSON file and returns its value.

    Raises:
        OSError: the file cannot be read, or is missing.
        ValueError: it is no regular file, no JSON, nested too deeply, or longer than `max_bytes`.
    """
    return parse_json(read_bounded(path, max_bytes))


def parse_json(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where the text is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_end(path: Path, max_bytes: int) -> str:
    """The last `max_bytes` of a regular file as text, wrong UTF-8 replaced; "" if the file cannot be read."""
    try:
        with _open(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _open(path: Path) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path.name} is no regular file")
    return file
