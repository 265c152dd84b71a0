"""Conversion of an episode's trace to and from a list of turns, for the formats of other trainers.

Invariant: a trace that is converted there and back is the same. A trace that is not one sequence of one policy version
is refused, never repaired.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from swarm.episode import MAX_TURNS
from swarm.exchange.checks.admission_checks import ROUNDING_NATS
from swarm.types import PolicyVersion, TokenTrace, VersionSpan

_LEAST_NATS: Final = -1e30  # finite as float32 too


class TraceTurn(NamedTuple):
    """One action, with the tokens that the model read since the action before."""

    observed_ids: list[int]  # of the first turn: none, as the prompt is no part of a trace
    chosen_ids: list[int]
    logprobs: list[float]  # of each chosen token


def turns_of(trace: TokenTrace, conversations: Sequence[int]) -> list[TraceTurn]:
    """The turns of an episode of one conversation.

    Args:
        trace: tokens of the rollout.
        conversations: conversation of each action, as in `EpisodeOutcome.conversations`.

    Raises:
        ValueError: the trace has no log-probs, several conversations, or several policy versions.
    """
    if trace.logprobs is None:
        raise ValueError("an episode without log-probs is no training trace")
    if any(conversations):
        raise ValueError(f"an episode of {len(set(conversations))} conversations is no one sequence; expected 1")
    if len(trace.spans) > 1:
        raise ValueError(f"tokens of {len(trace.spans)} policy versions; a training trace names none; expected 1")
    turns, end, ids = list[TraceTurn](), 0, trace.token_ids.tolist()
    for number in range(int(trace.turn_ids[-1]) + 1):
        places = np.flatnonzero((trace.turn_ids == number) & trace.action_mask)
        start, before = int(places[0]), end
        end = int(places[-1]) + 1
        logprobs = trace.logprobs[start:end].astype(float).tolist()
        turns.append(TraceTurn(ids[before:start], ids[start:end], logprobs))
    return turns


def trace_of(prompt_ids: Sequence[int], turns: Sequence[TraceTurn], version: PolicyVersion) -> TokenTrace:
    """Builds the trace of turns that one policy version made; the turns may be hostile.

    Raises:
        ValueError: the prompt is empty; there is no turn, or there are too many; a turn lacks tokens or log-probs; a
            number is not a token id or a log-prob.
    """
    if not prompt_ids or not 0 < len(turns) <= MAX_TURNS:
        raise ValueError(
            f"{len(prompt_ids)} tokens of a prompt and {len(turns)} turns; expected 1 to {MAX_TURNS} turns"
        )
    ids, mask, logprobs, turn_ids = list[int](), list[bool](), list[float](), list[int]()
    for number, turn in enumerate(turns):
        num_observed, num_chosen = len(turn.observed_ids), len(turn.chosen_ids)
        if not num_chosen or len(turn.logprobs) != num_chosen:
            raise ValueError(f"turn {number} lacks tokens or log-probs")
        if not all(_LEAST_NATS <= each <= ROUNDING_NATS for each in turn.logprobs):
            raise ValueError(f"turn {number} has log-probs that are none")
        ids += [*turn.observed_ids, *turn.chosen_ids]
        mask += [False] * num_observed + [True] * num_chosen
        logprobs += [math.nan] * num_observed + [min(each, 0.0) for each in turn.logprobs]
        turn_ids += [number - 1] * num_observed + [number] * num_chosen
    if not all(0 <= each < 2**31 for each in (*prompt_ids, *ids)):
        raise ValueError("there are ids that are none")
    return TokenTrace(
        token_ids=np.array(ids, np.int32),
        action_mask=np.array(mask, np.bool_),
        logprobs=np.array(logprobs, np.float32),
        turn_ids=np.array(turn_ids, np.int16),
        spans=(VersionSpan(start=0, version=version),),
    )
