"""The batch of a draw: rollouts as tensors, with text of another tokenizer re-encoded in our own tokens.

Invariant: a token is trained only if the generator chose it; text-only rollouts of other nodes are cut to their limit.
Shape letters: N rollouts, L longest response in tokens, P prompt tokens, K most turns of a rollout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.environments.tool_calls import parse_action
from swarm.episode import OUTCOME, EpisodeOutcome, Transition
from swarm.errors import ConfigError
from swarm.interfaces import TaskOf, Tokenizer
from swarm.model.conversations import Conversations, conversation_ids
from swarm.model.token_alignment import aligned_logprobs, cut_to_limit
from swarm.objectives.batch import Batch
from swarm.types import Correction, Draw, DrawnGroup, FinishReason, FloatArray, Rollout, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class _Response:
    token_ids: np.ndarray  # [T]
    mask: np.ndarray  # [T]
    logprobs: np.ndarray  # [T], NaN where unknown
    turn_ids: np.ndarray  # [T]
    conversation_ids: np.ndarray  # [T]
    correction: Correction
    segments: tuple[np.ndarray, np.ndarray] | None = None  # ids and log-probs, both [T]


def make_batch(
    draw: Draw,
    tokenizer: Tokenizer,
    device: torch.device | str = "cpu",
    task_of: TaskOf | None = None,
    policy_id: str | None = None,
) -> Batch:
    """Returns the batch of a draw; groups of another tokenizer are re-encoded with our own, prompts included.

    Args:
        draw: at least one group; every group has as many rewards as rollouts.
        tokenizer: our own.
        device: device of the tensors.
        task_of: rebuilds the task of a group made with another tokenizer, to encode the prompt anew.
        policy_id: our own lineage; groups of other lineages are external. None: groups of other nodes are external.

    Raises:
        ConfigError: the draw is empty, or a group has another tokenizer and `task_of` is None.
    """
    if not draw.groups:
        raise ConfigError(f"draw for step {draw.step} has no group to learn from")
    rollouts: list[Rollout] = []
    prompts: list[Tensor] = []
    group_index: list[int] = []
    responses: list[_Response] = []
    groups = [_as_scored(drawn.scored, tokenizer) for drawn in draw.groups]
    for index, scored in enumerate(groups):
        prompt_ids = own_prompt_ids(scored, tokenizer, task_of)
        count = len(scored.group.rollouts)
        assert count == scored.rewards.shape[0] and prompt_ids
        prompts.append(torch.tensor(prompt_ids, dtype=torch.int64, device=device))
        rollouts += scored.group.rollouts
        responses += [_response(scored, place, tokenizer) for place in range(count)]
        group_index += [index] * count
    is_from_peer = [not drawn.scored.is_made_here for drawn in draw.groups]
    is_newcomer = [not drawn.is_established for drawn in draw.groups]
    is_external = is_from_peer if policy_id is None else [not d.scored.is_own_policy(policy_id) for d in draw.groups]
    most_tokens = [rollout.sampling.max_new_tokens * max(1, len(rollout.actions)) for rollout in rollouts]
    length = max(1, max(response.token_ids.shape[0] for response in responses))
    mask = _padded([response.mask for response in responses], length, np.bool_)
    logprobs = np.where(mask, _padded([r.logprobs for r in responses], length, np.float32), np.float32(0))

    segments = _segments(responses, mask)
    conversations = _padded([r.conversation_ids for r in responses], length, np.int64)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    turns: dict[str, Any] = {
        name: tensor(values) if isinstance(values, np.ndarray) else values
        for name, values in turn_columns(groups).items()
    }
    return Batch(
        token_ids=tensor(_padded([r.token_ids for r in responses], length, np.int64)),
        mask=tensor(mask),
        behavior_logprobs=tensor(logprobs),
        rewards=tensor(np.concatenate([d.scored.rewards for d in draw.groups]).astype(np.float32)),
        advantages=torch.zeros(mask.shape, device=device),
        turn_ids=tensor(_padded([r.turn_ids for r in responses], length, np.int64)),
        group_index=tensor(np.array(group_index, dtype=np.int64)),
        age_steps=tensor(_per_rollout(draw.groups, [d.age_steps for d in draw.groups], np.int64)),
        is_external=tensor(_per_rollout(draw.groups, is_external, np.bool_)),
        is_from_peer=tensor(_per_rollout(draw.groups, is_from_peer, np.bool_)),
        is_newcomer=tensor(_per_rollout(draw.groups, is_newcomer, np.bool_)) if any(is_newcomer) else None,
        temperature=tensor(np.array([_temperature(rollout) for rollout in rollouts], np.float32)),
        length=tensor(mask.sum(axis=1).astype(np.int64)),
        max_new_tokens=tensor(np.array(most_tokens, np.int64)),
        is_truncated=tensor(np.array([rollout.finish is FinishReason.LENGTH for rollout in rollouts], np.bool_)),
        corrections=tuple(response.correction for response in responses),
        prompts=tuple(prompts),
        texts=tuple(rollout.text for rollout in rollouts),
        sources=tuple(drawn.scored.group.producer for drawn in draw.groups),
        task_keys=tuple(f"{drawn.scored.group.env}/{drawn.scored.group.task_id}" for drawn in draw.groups),
        step_tokens=int(mask.sum()),
        step_rollouts=len(responses),
        step_groups=len(draw.groups),
        baseline_rewards=tensor(np.array(draw.baselines, np.float32)) if draw.baselines else None,
        segment_ids=None if segments is None else tensor(segments[0]),
        segment_logprobs=None if segments is None else tensor(segments[1]),
        conversation_ids=tensor(conversations) if conversations.any() else None,
        reward_parts={name: tensor(values) for name, values in named_rewards(groups).items()},
        **turns,
    )


def own_prompt_ids(scored: ScoredGroup, tokenizer: Tokenizer, task_of: TaskOf | None) -> list[int]:
    """Returns the prompt in our own tokens. Raises ConfigError if this needs the task and `task_of` is None."""
    group = scored.group
    if scored.correction is not Correction.TEXT_ONLY or group.tokenizer_digest == tokenizer.digest:
        return group.prompt_ids.tolist()
    if task_of is None:
        raise ConfigError(f"a group of {group.producer[:8]} has another tokenizer, and its task cannot be rebuilt here")
    return tokenizer.encode_prompt(task_of(group.env, group.task_id))


def _as_scored(scored: ScoredGroup, tokenizer: Tokenizer) -> ScoredGroup:
    """Returns a group with text-only rollouts of other nodes cut to their limit, as they were when scored."""
    if scored.is_made_here or scored.correction is not Correction.TEXT_ONLY:
        return scored
    rollouts = tuple(cut_to_limit(rollout, tokenizer) for rollout in scored.group.rollouts)
    return replace(scored, group=replace(scored.group, rollouts=rollouts))


def _response(scored: ScoredGroup, place: int, tokenizer: Tokenizer) -> _Response:
    rollout, correction = scored.group.rollouts[place], scored.correction
    trace = rollout.trace
    outcome = _outcomes(scored)[place]
    if correction is Correction.TEXT_ONLY or trace is None:
        return _reencoded(rollout, outcome, Conversations(tokenizer, scored.group.env), tokenizer)
    if trace.logprobs is None or correction is not Correction.EXACT:
        correction = Correction.NO_LOGPROBS
        logprobs = np.full(trace.token_ids.shape, np.nan, np.float32)
    else:
        logprobs = trace.logprobs
    mask = trace.action_mask & (rollout.finish is not FinishReason.ABORTED)
    of_turns = (0,) if outcome is None else outcome.conversations
    return _Response(
        token_ids=trace.token_ids,
        mask=mask,
        logprobs=logprobs,
        turn_ids=trace.turn_ids,
        conversation_ids=conversation_ids(of_turns, trace.turn_ids, trace.action_mask),
        correction=correction,
    )


def _reencoded(
    rollout: Rollout, outcome: EpisodeOutcome | None, conversations: Conversations, tokenizer: Tokenizer
) -> _Response:
    """Encodes a rollout in our own tokens, turn by turn; observations come from our own replay."""
    ids: list[int] = []
    is_trained: list[bool] = []
    turn_ids: list[int] = []
    conversation, in_conversation = 0, list[int]()
    for turn, text in enumerate(rollout.actions):
        action = tokenizer.encode_response(text)
        is_end_chosen = _is_ended(rollout, turn, len(action))
        if not is_end_chosen and len(action) > 1:  # the end that encoding appends is no decision of the generator
            action = action[:-1]
        is_trained += [True] * (len(action) - 1) + [is_end_chosen or action[-1] not in tokenizer.eos_ids]
        in_conversation += [conversation] * len(action)
        seen: Sequence[int] = ()
        if turn < len(rollout.actions) - 1:
            reply = outcome.transitions[turn] if outcome and turn < len(outcome.transitions) else Transition()
            seen, conversation = conversations.observe(reply, action[-1] in tokenizer.eos_ids)
        in_conversation += [conversation] * len(seen)
        ids += [*action, *seen]
        is_trained += [False] * len(seen)
        turn_ids += [turn] * (len(action) + len(seen))
    segments = aligned_logprobs(rollout, tokenizer) if len(rollout.actions) == 1 else None
    return _Response(
        token_ids=np.array(ids, np.int64),
        mask=np.array(is_trained, np.bool_) & (rollout.finish is not FinishReason.ABORTED),
        logprobs=np.full(len(ids), np.nan, np.float32),
        turn_ids=np.array(turn_ids, np.int64),
        conversation_ids=np.array(in_conversation, np.int64),
        correction=Correction.TEXT_ONLY,
        segments=None if segments is None else (segments[0][: len(ids)], segments[1][: len(ids)]),
    )


def _is_ended(rollout: Rollout, turn: int, length: int) -> bool:
    """True if the generator ended the turn itself, not its token limit.

    The finish reason decides for the last turn. An earlier turn must be shorter than the limit in the generator's
    tokens, and no longer than the limit in our own (`length`).
    """
    if turn == len(rollout.actions) - 1:
        return rollout.finish is FinishReason.STOP
    trace = rollout.trace
    num_tokens = 0 if trace is None else int(((trace.turn_ids == turn) & trace.action_mask).sum())
    return num_tokens < rollout.sampling.max_new_tokens and length <= rollout.sampling.max_new_tokens


def _segments(responses: Sequence[_Response], mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Segment ids and log-probs, both [N, L]; None if no response has segments."""
    if all(response.segments is None for response in responses):
        return None
    none = (np.zeros(0, np.int64), np.zeros(0, np.float32))
    found = [response.segments or none for response in responses]
    ids = _padded([each[0] + 1 for each in found], mask.shape[1], np.int64) - 1  # -1 where there is none
    logprobs = _padded([each[1] for each in found], mask.shape[1], np.float32)
    return np.where(mask, ids, -1), np.where(mask, logprobs, np.float32(0))


def _temperature(rollout: Rollout) -> float:
    # Greedy text has no temperature at which its log-probs mean anything; it is scored at 1.
    return rollout.sampling.temperature if rollout.sampling.temperature > 0 else 1.0


def turn_columns(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Returns fields of `Batch` about turns, by name; empty if no rollout has several turns and no turn a reward.

    Each of `Rollout.actions` is a turn; the turns of a rollout without a replayed outcome have reward 0.
    """
    episodes = [pair for group in groups for pair in zip(group.group.rollouts, _outcomes(group), strict=True)]
    transitions = [_transitions(rollout, outcome) for rollout, outcome in episodes]
    if all(len(each) < 2 and not any(turn.reward for turn in each) for each in transitions):
        return {}
    most = max(map(len, transitions))
    turn_rewards = np.zeros((len(episodes), most), np.float32)
    num_calls = np.zeros((len(episodes), most), np.int64)
    for row, ((rollout, _), turns) in enumerate(zip(episodes, transitions, strict=True)):
        turn_rewards[row, : len(turns)] = [turn.reward for turn in turns]
        num_calls[row, : len(turns)] = [
            len(parse_action(text).calls) + turn.num_calls for text, turn in zip(rollout.actions, turns, strict=True)
        ]
    has_roles = any(turn.role for each in transitions for turn in each)
    return {
        "turn_rewards": turn_rewards,
        "num_turns": np.array([len(each) for each in transitions], np.int64),
        "num_calls": num_calls,
        "state_keys": tuple(tuple(turn.state_key for turn in each) for each in transitions),
        "turn_statuses": tuple(tuple(turn.status for turn in each) for each in transitions),
        "turn_roles": tuple(tuple(turn.role for turn in each) for each in transitions) if has_roles else None,
        "actions": tuple(rollout.actions for rollout, _ in episodes),
    }


def named_rewards(groups: Sequence[ScoredGroup]) -> dict[str, FloatArray]:
    """Returns every named reward [N], 0 for an episode without that name; empty if no group has outcomes."""
    if not any(group.outcomes for group in groups):
        return {}
    rewards: list[Mapping[str, float]] = [
        {OUTCOME: value} if outcome is None else outcome.rewards
        for group in groups
        for outcome, value in zip(_outcomes(group), group.rewards.tolist(), strict=True)
    ]
    names = sorted({name for each in rewards for name in each})
    return {name: np.array([each.get(name, 0.0) for each in rewards], np.float32) for name in names}


def _outcomes(group: ScoredGroup) -> Sequence[EpisodeOutcome | None]:
    """Outcome of each rollout; None for the rollouts of a group without outcomes."""
    return group.outcomes or (None,) * len(group.group.rollouts)


def _transitions(rollout: Rollout, outcome: EpisodeOutcome | None) -> list[Transition]:
    """Returns a transition for each action; one after the last replayed transition has no messages, reward or calls."""
    found = [] if outcome is None else list(outcome.transitions[: len(rollout.actions)])
    following = replace(found[-1], messages=(), reward=0.0, num_calls=0) if found else Transition()
    return found + [following] * (len(rollout.actions) - len(found))


def _padded(rows: Sequence[np.ndarray], length: int, dtype: type) -> np.ndarray:
    padded = np.zeros((len(rows), length), dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: values.shape[0]] = values
    return padded


def _per_rollout(groups: Sequence[DrawnGroup], values: Sequence[object], dtype: type) -> np.ndarray:
    return np.repeat(np.array(values, dtype), [len(drawn.scored.group.rollouts) for drawn in groups])
