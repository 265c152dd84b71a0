"""Counts the fields of a serialised group without building any of them.

Invariant: what passes can be parsed with memory proportional to its size. An empty submessage is two
bytes on the wire and dozens in memory, so a parser alone would turn 4 MiB into over 100 MiB.
"""

from typing import Final

MAX_FIELDS: Final = 16_384  # of the body, its rollouts and their traces together

_LEAST_FIELD_BYTES: Final = 2  # a tag, and a number or a length
_ROLLOUTS: Final = 7  # GroupBody.rollouts
_TRACE: Final = 2  # Rollout.trace
# The chain of submessages that hold repeated submessages: GroupBody.rollouts -> Rollout.trace -> (spans).
_PATH: Final = (_ROLLOUTS, _TRACE)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields_are_bounded(data: bytes) -> bool:
    """True when the message holds at most MAX_FIELDS fields along the path; a large one is walked to see."""
    if len(data) <= _LEAST_FIELD_BYTES * MAX_FIELDS:
        return True  # whether it is well formed, the parser says
    try:
        _count(data, 0, len(data), 0, 0)
    except (ValueError, IndexError):
        return False
    return True


def _count(data: bytes, at: int, end: int, depth: int, num_fields: int) -> int:
    """Adds the fields of data[at:end] to `num_fields`. Raises ValueError or IndexError where it cannot be."""
    while at < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise ValueError("too many fields")
        tag, at = _varint(data, at)
        if tag >> 32:
            raise ValueError("a field number beyond 29 bits")
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            if size > end - at:
                raise ValueError("a field longer than its message")
            if depth < len(_PATH) and tag >> 3 == _PATH[depth]:
                num_fields = _count(data, at, at + size, depth + 1, num_fields)
            at += size
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        else:
            raise ValueError("a group field, which proto3 does not have")
    if at != end:
        raise ValueError("a field reaches over the end")
    return num_fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, of at most ten bytes, and the position behind it."""
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
    raise ValueError("a varint of more than ten bytes")
