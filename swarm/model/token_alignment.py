"""Alignment with other tokenizers: fits their texts to our token limit, and finds two tokenisations' common segments.

Invariant: segments cover the text exactly and in order; a segment ends where a token of each side ends, at the same
byte. Positions are bytes of the text's UTF-8.
Shape letters: T tokens of one side, K segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarm.interfaces import Tokenizer
from swarm.types import FinishReason, IntArray, Rollout

Positions = NDArray[np.int64]

_CUT_TRIES = 8  # a character has at most four byte tokens

UNALIGNED = -1
"""Segment of a token that has no counterpart: an end token where the other side was cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Finest common segments of two tokenisations of one text."""

    ends: Positions  # [K], byte where each ends; an end token ends one byte past the text
    ours: Positions  # [T], segment of each of our tokens, in order, or UNALIGNED
    theirs: Positions  # [T], segment of each of their tokens

    def sums_of_theirs(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """[K] sum over each segment of `values` [T], one for each of their tokens."""
        is_aligned = self.theirs != UNALIGNED
        sums = np.zeros(self.ends.size, np.float64)
        np.add.at(sums, self.theirs[is_aligned], values[is_aligned])
        return sums

    def at_our_first_tokens(self, sums: NDArray[np.float64]) -> NDArray[np.float32]:
        """[T]: each segment's value of `sums` [K] at the first of our tokens in the segment, 0 elsewhere."""
        placed = np.zeros(self.ours.shape, np.float32)
        segments, first = np.unique(self.ours, return_index=True)
        is_aligned = segments != UNALIGNED
        placed[first[is_aligned]] = sums[segments[is_aligned]]
        return placed


def token_ends(byte_lengths: Sequence[int] | IntArray, is_ended: bool) -> Positions:
    """[T] byte at which each token ends.

    Args:
        byte_lengths: [T], bytes of the text that each token stands for; some may stand for none.
        is_ended: True if a last token of no byte is an end token; it ends one byte past the text.
    """
    lengths = np.array(byte_lengths, np.int64)
    if is_ended and lengths.size and not lengths[-1]:
        lengths[-1] = 1
    return np.cumsum(lengths)


def align(ours: Positions, theirs: Positions, num_bytes: int) -> Alignment:
    """The finest common segments of two tokenisations, given the end of each token.

    Args:
        ours: [T], `token_ends` of our tokens, never falling.
        theirs: [T], `token_ends` of the other tokens, never falling.
        num_bytes: bytes of the text.

    Raises:
        ValueError: one of them does not cover the text.
    """
    for ends in (ours, theirs):
        if not ends.size or ends[-1] - num_bytes not in (0, 1):
            raise ValueError(f"tokens that end at {ends[-1:]} do not cover a text of {num_bytes} bytes")
    ends = np.intersect1d(ours, theirs)
    return Alignment(ends=ends, ours=_segments(ours, ends), theirs=_segments(theirs, ends))


def _segments(token_ends: Positions, ends: Positions) -> Positions:
    found = np.searchsorted(ends, token_ends, side="left")
    return np.where(found < ends.size, found, UNALIGNED)


def with_byte_lengths(rollout: Rollout, tokenizer: Tokenizer) -> Rollout:
    """Our rollout with the number of text bytes of each token, for nodes with other tokenizers.

    The rollout is unchanged unless it is a single turn with the canonical tokens of its text: the receiver compares
    canonical tokenisations, and could not notice that the rollout has another one.
    """
    trace = rollout.trace
    if trace is None or not trace.action_mask.all():
        return rollout
    lengths = tokenizer.byte_lengths(rollout.text)
    canonical = tokenizer.encode_response(rollout.text)
    is_whole = rollout.finish is FinishReason.STOP
    if not is_whole:
        lengths, canonical = lengths[:-1], canonical[:-1]
    if trace.token_ids.tolist() != canonical:
        return rollout
    return replace(rollout, trace=replace(trace, byte_lengths=np.array(lengths, np.int32)))


def cut_to_limit(rollout: Rollout, tokenizer: Tokenizer) -> Rollout:
    """The rollout, with each turn that exceeds `max_new_tokens` in our tokens cut off.

    Returns the same object if all turns fit. The sender's log-probs do not apply to a turn that was cut: they are
    removed, and the rollout is scored and learned like one of our own that was cut off.
    """
    most, last = rollout.sampling.max_new_tokens, len(rollout.actions) - 1
    actions, finish = list(rollout.actions), rollout.finish
    is_whole = True
    for turn, text in enumerate(actions):
        is_end_drawn = turn == last and rollout.finish is FinishReason.STOP  # else an end need not fit
        token_ids = tokenizer.encode_response(text)
        if len(token_ids) - (not is_end_drawn) > most:
            actions[turn], is_whole = _beginning(text, token_ids, most, tokenizer), False
            finish = FinishReason.LENGTH if turn == last else finish
    if is_whole:
        return rollout
    trace = rollout.trace and replace(rollout.trace, logprobs=None, byte_lengths=None)
    return replace(rollout, actions=tuple(actions), finish=finish, trace=trace)


def _beginning(text: str, token_ids: Sequence[int], most: int, tokenizer: Tokenizer) -> str:
    """The longest beginning of a text with at most `most` tokens that _CUT_TRIES tries find; else ""."""
    for count in range(most, max(0, most - _CUT_TRIES), -1):
        kept = tokenizer.decode(token_ids[:count])
        # Not inside a character; and what is encoded by itself may be cut in another way at its end.
        if text.startswith(kept) and len(tokenizer.encode_response(kept)) - 1 <= most:
            return kept
    return ""


def aligned_logprobs(rollout: Rollout, tokenizer: Tokenizer) -> tuple[Positions, NDArray[np.float32]] | None:
    """The sender's log-probs, summed over segments and placed on our tokens of the same text.

    Returns:
        (segment of each token of `tokenizer.encode_response(rollout.text)`, the sender's log-prob of each segment at
        its first token, in nats); None if the rollout lacks exact log-probs or byte lengths that fit its text.
    """
    trace = rollout.trace
    if trace is None or trace.logprobs is None or trace.byte_lengths is None or not rollout.sampling.is_exact:
        return None
    num_bytes, own_lengths = len(rollout.text.encode()), tokenizer.byte_lengths(rollout.text)
    if not sum(own_lengths) == trace.byte_lengths.sum(dtype=np.int64) == num_bytes:
        return None  # our tokenizer drops characters
    ours, theirs = token_ends(own_lengths, True), token_ends(trace.byte_lengths, rollout.finish is FinishReason.STOP)
    found = align(ours, theirs, num_bytes)
    return found.ours, found.at_our_first_tokens(found.sums_of_theirs(trace.logprobs))
