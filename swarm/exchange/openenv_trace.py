"""Episodes as OpenEnv's `TrainingTrace` version 1 (openenv.core.harness.training), out and in.

Of each call of the engine that form has prompt, completion, log-probs, and a mask over prompt and completion. Here an
episode is one sequence that is only appended to: the prompt of a turn is all that comes before it.

Invariant: what goes out and comes in again is the same trace. What cannot be one sequence of one policy version is
refused, never repaired: a prompt that does not begin with the turn before it was rendered again, and the model never
saw it.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from swarm.episode import MAX_TURNS
from swarm.exchange.admission_checks import ROUNDING_NATS
from swarm.types import IntArray, PolicyVersion, TokenTrace, VersionSpan

SCHEMA_VERSION: Final = 1


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]


class _Trace(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    schema_version: int
    turns: list[_Turn]


def to_training_trace(prompt_ids: IntArray, trace: TokenTrace, conversations: Sequence[int]) -> dict[str, Any]:
    """The trace of an episode of one conversation as JSON values.

    Args:
        prompt_ids: of its task.
        trace: of its rollout.
        conversations: of each of its actions, as `EpisodeOutcome.conversations` has them.

    Raises:
        ValueError: it has no log-probs, which that form requires, or what that form cannot say: several conversations,
            or several policy versions.
    """
    if trace.logprobs is None:
        raise ValueError("an episode without log-probs is no training trace")
    if any(conversations):
        raise ValueError(f"an episode of {len(set(conversations))} conversations is no one sequence; expected 1")
    if len(trace.spans) > 1:
        raise ValueError(f"tokens of {len(trace.spans)} policy versions; a training trace names none; expected 1")
    turns: list[dict[str, Any]] = []
    for number in range(int(trace.turn_ids[-1]) + 1):
        places = np.flatnonzero((trace.turn_ids == number) & trace.action_mask)
        start, end = int(places[0]), int(places[-1]) + 1
        prompt = [*prompt_ids.tolist(), *trace.token_ids[:start].tolist()]
        turns.append(
            {
                "node_id": f"turn-{number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": trace.token_ids[start:end].tolist(),
                "per_token_logps": trace.logprobs[start:end].astype(float).tolist(),
                "loss_mask": [0] * len(prompt) + [1] * (end - start),
            }
        )
    return {"schema_version": SCHEMA_VERSION, "turns": turns}


def from_training_trace(data: object, version: PolicyVersion) -> tuple[list[int], TokenTrace]:
    """Ids of the prompt, and the trace; the data may be hostile.

    Args:
        data: as JSON has it.
        version: of the policy that made it, which that form does not name.

    Raises:
        ValueError: another form or version, or turns that are no one sequence, each chosen by the model as a whole.
    """
    try:
        read = _Trace.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"no training trace: {error.error_count()} fields differ") from None
    if read.schema_version != SCHEMA_VERSION or not 0 < len(read.turns) <= MAX_TURNS:
        raise ValueError(f"version {read.schema_version} with {len(read.turns)} turns; expected {SCHEMA_VERSION}")
    prompt = read.turns[0].prompt_token_ids
    ids, mask, logprobs, turn_ids = list[int](), list[bool](), list[float](), list[int]()
    for number, turn in enumerate(read.turns):
        _check(turn, number)
        so_far = [*prompt, *ids]
        if turn.prompt_token_ids[: len(so_far)] != so_far:
            raise ValueError(f"the prompt of turn {number} does not begin with what came before")
        observed = turn.prompt_token_ids[len(so_far) :]
        chosen = turn.completion_token_ids
        ids += [*observed, *chosen]
        mask += [False] * len(observed) + [True] * len(chosen)
        logprobs += [math.nan] * len(observed) + [min(each, 0.0) for each in turn.per_token_logps]
        turn_ids += [number - 1] * len(observed) + [number] * len(chosen)
    return prompt, TokenTrace(
        token_ids=np.array(ids, np.int32),
        action_mask=np.array(mask, np.bool_),
        logprobs=np.array(logprobs, np.float32),
        turn_ids=np.array(turn_ids, np.int16),
        spans=(VersionSpan(start=0, version=version),),
    )


def _check(turn: _Turn, number: int) -> None:
    num_prompt, num_chosen = len(turn.prompt_token_ids), len(turn.completion_token_ids)
    if not num_prompt or not num_chosen or len(turn.per_token_logps) != num_chosen:
        raise ValueError(f"turn {number} lacks tokens or log-probs")
    if turn.loss_mask != [0] * num_prompt + [1] * num_chosen:
        raise ValueError(f"turn {number} has tokens that the mask leaves out")
    if not all(0 <= each < 2**31 for each in (*turn.prompt_token_ids, *turn.completion_token_ids)):
        raise ValueError(f"turn {number} has ids that are none")
    if not all(math.isfinite(each) and each <= ROUNDING_NATS for each in turn.per_token_logps):
        raise ValueError(f"turn {number} has log-probs that are none")
