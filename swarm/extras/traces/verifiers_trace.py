"""Conversion of episodes to and from traces of verifiers (`verifiers.v1.Trace`, version 1).

That format is a graph of messages. Each message has the tokens that it adds to the sequence, a mask of the tokens that
the model chose, and their log-probs. Here an episode is a path: the last message of the opening has all tokens of the
prompt, and the last message of an observation has all tokens of the observation.

Invariant: that of `trace_turns`. The JSON that verifiers itself writes has log-probs of four digits after the point;
nothing else is rounded.
"""

from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.episode import MAX_TURNS, OUTCOME, Actions, EpisodeOutcome, Message
from swarm.extras.traces.trace_turns import TraceTurn, trace_of, turns_of
from swarm.types import IntArray, PolicyVersion, TokenTrace

SCHEMA_VERSION: Final = 1
_MAX_NODES: Final = 8 * MAX_TURNS  # messages


class _Node(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    parent: int | None = None
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]


class _Trace(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    version: int
    nodes: list[_Node] = Field(max_length=_MAX_NODES)


def to_verifiers_trace(
    task: str,
    opening: Sequence[Message],
    prompt_ids: IntArray,
    actions: Actions,
    trace: TokenTrace,
    outcome: EpisodeOutcome,
) -> dict[str, Any]:
    """An episode of one conversation as JSON values.

    Args:
        task: name of the task in the trace.
        opening: messages of the prompt.
        prompt_ids: token ids of the prompt.
        actions: text of each turn.
        trace: tokens of the rollout.
        outcome: outcome of a replay, with the messages of the environment, which stored outcomes leave out. Of its
            rewards `outcome` has weight 1, all others have weight 0.

    Raises:
        ValueError: as `turns_of`; or actions, trace and outcome are not of one episode, or lack messages.
    """
    turns = turns_of(trace, outcome.conversations)
    if not len(turns) == len(actions) == len(outcome.transitions):
        counts = f"{len(turns)} turns, {len(actions)} actions and {len(outcome.transitions)} transitions"
        raise ValueError(f"{counts} are not of one episode; give the outcome of a replay of these actions")
    nodes = _told(opening, prompt_ids.tolist())
    for turn, text, before in zip(turns, actions, [None, *outcome.transitions], strict=False):
        nodes += [] if before is None else _told(before.messages, turn.observed_ids)
        chosen = {"token_ids": turn.chosen_ids, "mask": [True] * len(turn.chosen_ids), "logprobs": turn.logprobs}
        nodes.append({"message": {"role": "assistant", "content": text}, "sampled": True, **chosen})
    for number, node in enumerate(nodes):
        node["parent"] = number - 1 if number else None
    rewards = {name: {"score": value, "weight": float(name == OUTCOME)} for name, value in outcome.rewards.items()}
    data = {"name": task, "prompt": [{"role": each.role, "content": each.content} for each in opening]}
    return {
        "version": SCHEMA_VERSION,
        "task": {"type": "TaskData", "data": data},
        "agent": {"config": {}},
        "nodes": nodes,
        "rewards": rewards,
        "is_completed": True,
        "ok": True,
    }


def from_verifiers_trace(data: object, version: PolicyVersion) -> tuple[list[int], TokenTrace]:
    """Token ids of the prompt, and the trace up to its last action; the data may be hostile.

    Args:
        data: decoded JSON (`trace.model_dump(mode="json")`).
        version: policy version that made the trace, which that format does not name.

    Raises:
        ValueError: another format or version, several branches, tokens chosen in the middle of a message, or what
            `trace_of` refuses.
    """
    try:
        read = _Trace.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"no trace of verifiers: {error.error_count()} fields differ") from None
    if read.version != SCHEMA_VERSION:
        raise ValueError(f"version {read.version} of the form; expected {SCHEMA_VERSION}")
    prompt, turns, told = list[int](), list[TraceTurn](), list[int]()
    for number, node in enumerate(read.nodes):
        if node.parent != (number - 1 if number else None):
            raise ValueError(f"message {number} follows {node.parent}: a trace of several branches is no one sequence")
        num_chosen = sum(node.mask)
        num_told = len(node.token_ids) - num_chosen
        if num_told < 0 or node.mask != [False] * num_told + [True] * num_chosen:
            raise ValueError(f"message {number} has tokens that the mask leaves out")
        told += node.token_ids[:num_told]
        if num_chosen and not turns:
            prompt, told = told, []
        if num_chosen:
            turns.append(TraceTurn(told, node.token_ids[num_told:], node.logprobs))
            told = []
    return prompt, trace_of(prompt, turns, version)


def _told(messages: Sequence[Message], token_ids: list[int]) -> list[dict[str, Any]]:
    """Nodes of messages that the model read, the last one with all tokens. Raises ValueError without a message."""
    if token_ids and not messages:
        raise ValueError(f"{len(token_ids)} tokens that the model read are of no message; give the outcome of a replay")
    nodes: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        ids = token_ids if number == len(messages) else []
        said = {"role": message.role, "content": message.content}
        if message.role == "tool":
            said["tool_call_id"] = ""
        nodes.append({"message": said, "token_ids": ids, "mask": [False] * len(ids), "logprobs": []})
    return nodes
