"""Conversion of episodes to and from OpenEnv's `TrainingTrace` version 1 (openenv.core.harness.training).

For each call of the engine that format has a prompt, a completion, log-probs, and a mask over prompt and completion.
Here an episode is one sequence to which tokens are only appended: the prompt of a turn is all tokens before the turn.

Invariant: that of `trace_turns`. A prompt that does not begin with the turn before it was rendered again, so that the
model never saw that sequence; such a trace is refused.
"""

from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.episode import MAX_TURNS
from swarm.extras.traces.trace_turns import TraceTurn, trace_of, turns_of
from swarm.types import IntArray, PolicyVersion, TokenTrace

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
    turns: list[_Turn] = Field(max_length=MAX_TURNS)


def to_training_trace(prompt_ids: IntArray, trace: TokenTrace, conversations: Sequence[int]) -> dict[str, Any]:
    """The trace of an episode of one conversation as JSON values.

    Args:
        prompt_ids: token ids of the task's prompt.
        trace: tokens of the rollout.
        conversations: conversation of each action, as in `EpisodeOutcome.conversations`.

    Raises:
        ValueError: as `turns_of`.
    """
    so_far, turns = prompt_ids.tolist(), list[dict[str, Any]]()
    for number, turn in enumerate(turns_of(trace, conversations)):
        prompt = [*so_far, *turn.observed_ids]
        turns.append(
            {
                "node_id": f"turn-{number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": turn.chosen_ids,
                "per_token_logps": turn.logprobs,
                "loss_mask": [0] * len(prompt) + [1] * len(turn.chosen_ids),
            }
        )
        so_far = [*prompt, *turn.chosen_ids]
    return {"schema_version": SCHEMA_VERSION, "turns": turns}


def from_training_trace(data: object, version: PolicyVersion) -> tuple[list[int], TokenTrace]:
    """Token ids of the prompt, and the trace; the data may be hostile.

    Args:
        data: decoded JSON.
        version: policy version that made the trace, which that format does not name.

    Raises:
        ValueError: another format or version, turns that are not one sequence, or a completion with tokens that the
            model did not choose.
    """
    try:
        read = _Trace.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"no training trace: {error.error_count()} fields differ") from None
    if read.schema_version != SCHEMA_VERSION or not read.turns:
        raise ValueError(f"version {read.schema_version} with {len(read.turns)} turns; expected {SCHEMA_VERSION}")
    prompt, turns = read.turns[0].prompt_token_ids, list[TraceTurn]()
    so_far = list(prompt)
    for number, turn in enumerate(read.turns):
        num_prompt, num_chosen = len(turn.prompt_token_ids), len(turn.completion_token_ids)
        if turn.loss_mask != [0] * num_prompt + [1] * num_chosen:
            raise ValueError(f"turn {number} has tokens that the mask leaves out")
        if turn.prompt_token_ids[: len(so_far)] != so_far:
            raise ValueError(f"the prompt of turn {number} does not begin with what came before")
        observed = turn.prompt_token_ids[len(so_far) :]
        turns.append(TraceTurn(observed, turn.completion_token_ids, turn.per_token_logps))
        so_far = [*turn.prompt_token_ids, *turn.completion_token_ids]
    return prompt, trace_of(prompt, turns, version)
