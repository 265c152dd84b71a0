"""Counts of a group's fields and numbers on the wire, bounded before anything is parsed.

A few hundred bytes can decompress to a million empty submessages or token ids, each dozens of bytes in memory and one
turn of a Python loop. Invariant: a body that `check_counts` accepts parses to at most SMALL_BYTES objects (at most
MIDDLING_BYTES if a quarter of its bytes were received), or as many as the limits allow. The bounds are a few times the
counts of an honest group, so a group of another configuration is refused later, with its exact reason.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from swarm.types import RefusalReason
from swarm.wire.rollout_groups import MAX_ROLLOUTS, MAX_TOKENS, Malformed

SMALL_BYTES: Final = 16_384  # a message of this length has no more numbers than bytes
MIDDLING_BYTES: Final = 4 * SMALL_BYTES  # the same, if at least a quarter of it was received: walking it costs 100 us
MAX_FIELDS: Final = 16_384  # of the body, its rollouts and their traces together
_PROMPT_TOKENS: Final = 4096  # of a message of any size; further ones are allowed per received byte
_PROMPT_TOKENS_PER_BYTE: Final = 16
_SLACK: Final = 4  # times an honest group
_FIELDS_OF_ROLLOUT: Final = 16  # of a rollout and its trace without spans: 11, each once
_FIELDS_OF_BODY: Final = 64
_TEXT_BYTES_PER_TOKEN: Final = 256
_NUMBER_BYTES: Final = 5  # of a uint32, at most
_OTHER_BYTES: Final = 1024  # of any other field: names, digests, a span


@dataclass(frozen=True, kw_only=True, slots=True)
class CountLimits:
    """Bounds on the content of a whole group."""

    fields: int = MAX_FIELDS
    answer_tokens: int = MAX_ROLLOUTS * MAX_TOKENS  # of all rollouts together
    prompt_tokens: int = MAX_TOKENS  # and 16 for each received byte

    @classmethod
    def of_run(cls, *, group_size: int, max_new_tokens: int, max_age_steps: int, max_turns: int = 1) -> "CountLimits":
        """The limits of a run: four times an honest group, at most MAX_FIELDS fields.

        An answer has a span for each version that served it, and an episode three fields for each turn after the first.
        """
        rollouts = _SLACK * group_size
        of_rollout = _FIELDS_OF_ROLLOUT + max_age_steps + 1 + 3 * (max_turns - 1)
        return cls(
            fields=min(MAX_FIELDS, _FIELDS_OF_BODY + rollouts * of_rollout),
            answer_tokens=rollouts * (max_new_tokens + 1),
            prompt_tokens=_PROMPT_TOKENS,
        )


_ROLLOUTS: Final = 7  # GroupBody.rollouts
_TRACE: Final = 2  # Rollout.trace
# Submessages that hold repeated submessages: GroupBody.rollouts -> Rollout.trace -> (spans).
_PATH: Final = (_ROLLOUTS, _TRACE)
_PROMPT: Final = (0, 6)  # depth and field: GroupBody.prompt_ids
_TEXTS: Final = frozenset({(1, 1), (1, 6)})  # Rollout.text, later_texts
_LOGPROBS: Final = (2, 3)  # TokenTrace.logprobs
_PER_TOKEN: Final = frozenset({(2, 1), (2, 2), (2, 4), (2, 6)})  # token_ids, action_runs, turn_starts, byte_lengths
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_counts(data: bytes, num_travelled: int, limits: CountLimits) -> None:
    """Raises Malformed if a serialised GroupBody exceeds the limits; a body too small to exceed them is not examined.

    Args:
        data: the decompressed body.
        num_travelled: length of the body as received.
        limits: bounds of the group.
    """
    if len(data) <= max(SMALL_BYTES, min(4 * num_travelled, MIDDLING_BYTES)):
        return  # the parser checks its form
    walk = _Walk(data, limits, limits.prompt_tokens + _PROMPT_TOKENS_PER_BYTE * num_travelled)
    try:
        walk.message(0, len(data), 0)
    except (ValueError, IndexError) as error:
        raise Malformed(RefusalReason.MALFORMED, f"not a group, or one of too many fields: {error}") from None


class _Walk:
    """One pass over a message, which raises ValueError or IndexError for a wrong form, Malformed beyond a bound.

    The parser merges repeated singular messages, so counts are totals over the whole group.
    """

    def __init__(self, data: bytes, limits: CountLimits, prompt_tokens: int) -> None:
        self._data = data
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        self._limits = limits
        self._prompt_tokens = prompt_tokens
        self._num_fields = 0
        self._totals: dict[tuple[int, int], int] = {}  # by depth and field: numbers, or bytes

    def message(self, at: int, end: int, depth: int) -> None:
        """Counts the fields of data[at:end], a message at this depth."""
        data, most = self._data, self._limits.fields
        while at < end:
            self._num_fields += 1
            if self._num_fields > most:
                raise ValueError(f"more than {most} fields")
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
                    self.message(at, at + size, depth + 1)
                else:
                    self._bytes_field((depth, tag >> 3), at, size)
                at += size
            elif kind == _FIXED64:
                at += 8
            elif kind == _FIXED32:
                at += 4
            else:
                raise ValueError("a group field, which proto3 does not have")
        if at != end:
            raise ValueError("a field reaches over the end")

    def _bytes_field(self, field: tuple[int, int], at: int, size: int) -> None:
        tokens = self._limits.answer_tokens
        if field == _PROMPT:
            # an honest prompt can be long and regular, so the reason blames nobody
            self._add(field, self._numbers(at, size), self._prompt_tokens, RefusalReason.UNUSABLE_TEXT)
        elif field in _PER_TOKEN:
            self._add(field, self._numbers(at, size), tokens, RefusalReason.BAD_TOKENS)
        elif field in _TEXTS:
            self._add(field, size, _TEXT_BYTES_PER_TOKEN * tokens, RefusalReason.BAD_TOKENS)
        elif field == _LOGPROBS:
            self._add(field, size, 4 * tokens, RefusalReason.BAD_LOGPROBS)
        elif size > _OTHER_BYTES:
            raise ValueError(f"{size} bytes in a short field")

    def _numbers(self, at: int, size: int) -> int:
        """Number of packed varints; for a field that is too long for every bound, its size instead, uncounted."""
        if size > _NUMBER_BYTES * max(self._prompt_tokens, self._limits.answer_tokens):
            return size
        return int(np.count_nonzero(self._bytes[at : at + size] < 0x80))

    def _add(self, field: tuple[int, int], count: int, most: int, reason: RefusalReason) -> None:
        total = self._totals.get(field, 0) + count
        if total > most:
            raise Malformed(reason, f"{total} in field {field[1]} exceed {most}")
        self._totals[field] = total


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at`, of at most ten bytes, and the position after it."""
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
