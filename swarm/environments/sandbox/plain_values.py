"""Frames between the processes of the sandbox, and plain Python values in them as JSON.

Invariant: a length is compared with its bound before anything of that size is allocated. Decoding builds values of the
types below and of no others, whatever the text says: None, bool, int, float, complex, str, bytes, list, tuple, set,
frozenset, dict.
"""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

MAX_FRAME_BYTES: Final = 64 * 2**20  # four bytes of length, then the content
MAX_DEPTH: Final = 64
_COLLECTIONS: Final = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: object) -> bytes:
    """Encodes a value as JSON, a subclass as its base. Raises TypeError for other types, ValueError over MAX_DEPTH."""
    return json.dumps(_tagged(value, 0)).encode()


def decode(data: bytes) -> Any:
    """The value that hostile JSON describes. Raises ValueError for anything that `encode` does not write."""
    try:
        return _plain(json.loads(data), 0)
    except (TypeError, KeyError, RecursionError, OverflowError) as error:  # TypeError: a list in a set
        raise ValueError(f"no plain value: {type(error).__name__}") from None


def _tagged(value: Any, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise ValueError(f"a value deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else cast("Callable[[Any], object]", kind)(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).decode("latin-1")}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [_tagged(item, depth + 1) for item in cast("Iterable[object]", value)]}
    if isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        return {"dict": [[_tagged(key, depth + 1), _tagged(item, depth + 1)] for key, item in pairs]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _plain(data: Any, depth: int) -> Any:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if depth > MAX_DEPTH or not isinstance(data, dict) or len(cast("dict[str, Any]", data)) != 1:
        raise ValueError("no plain value")
    [(name, content)] = cast("dict[str, Any]", data).items()
    if name == "complex":
        return complex(*content)
    if name == "bytes":
        return content.encode("latin-1")
    if name == "dict":
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in content}
    return _COLLECTIONS[name](_plain(item, depth + 1) for item in content)


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
