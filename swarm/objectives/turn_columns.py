"""What a batch knows of the turns of its rollouts, from the replay on this node and the texts of the turns.

Invariant: turns are those of `Rollout.actions`; a rollout without a replayed outcome has turns of reward 0.
Shape letters: N rollouts, K most turns of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarm.environments.tool_calls import parse_action
from swarm.episode import OUTCOME, Actions, EpisodeOutcome, Transition, TurnStatus
from swarm.types import FloatArray, Rollout, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnColumns:
    """Of several turns."""

    turn_rewards: FloatArray  # [N, K]
    num_turns: NDArray[np.int64]  # [N]
    num_calls: NDArray[np.int64]  # [N, K]
    state_keys: tuple[tuple[str, ...], ...]
    turn_statuses: tuple[tuple[TurnStatus, ...], ...]
    turn_roles: tuple[tuple[str, ...], ...] | None  # None where no episode has roles
    actions: tuple[Actions, ...]


def turn_columns(groups: Sequence[ScoredGroup]) -> TurnColumns | None:
    """The turns of groups, in order; None where no rollout has several and no turn a reward."""
    episodes = [pair for group in groups for pair in zip(group.group.rollouts, _outcomes(group), strict=True)]
    transitions = [_transitions(rollout, outcome) for rollout, outcome in episodes]
    if all(len(each) < 2 and not any(turn.reward for turn in each) for each in transitions):
        return None
    most = max(map(len, transitions))
    turn_rewards = np.zeros((len(episodes), most), np.float32)
    num_calls = np.zeros((len(episodes), most), np.int64)
    for row, ((rollout, _), turns) in enumerate(zip(episodes, transitions, strict=True)):
        turn_rewards[row, : len(turns)] = [turn.reward for turn in turns]
        num_calls[row, : len(turns)] = [
            len(parse_action(text).calls) + turn.num_calls for text, turn in zip(rollout.actions, turns, strict=True)
        ]
    has_roles = any(turn.role for each in transitions for turn in each)
    return TurnColumns(
        turn_rewards=turn_rewards,
        num_turns=np.array([len(each) for each in transitions], np.int64),
        num_calls=num_calls,
        state_keys=tuple(tuple(turn.state_key for turn in each) for each in transitions),
        turn_statuses=tuple(tuple(turn.status for turn in each) for each in transitions),
        turn_roles=tuple(tuple(turn.role for turn in each) for each in transitions) if has_roles else None,
        actions=tuple(rollout.actions for rollout, _ in episodes),
    )


def named_rewards(groups: Sequence[ScoredGroup]) -> dict[str, FloatArray]:
    """Every named reward [N], none where rewards say it all; 0 where an episode does not have it."""
    if not any(group.outcomes for group in groups):
        return {}
    rewards: list[Mapping[str, float]] = [
        {OUTCOME: value} if outcome is None else outcome.rewards
        for group in groups
        for outcome, value in zip(_outcomes(group), group.rewards.tolist(), strict=True)
    ]
    names = sorted({name for each in rewards for name in each})
    return {name: np.array([each.get(name, 0.0) for each in rewards], np.float32) for name in names}


def outcome_of(group: ScoredGroup, rollout: int) -> EpisodeOutcome | None:
    """Outcome of one rollout; None where the reward says it all."""
    return group.outcomes[rollout] if group.outcomes else None


def _outcomes(group: ScoredGroup) -> Sequence[EpisodeOutcome | None]:
    return group.outcomes or (None,) * len(group.group.rollouts)


def _transitions(rollout: Rollout, outcome: EpisodeOutcome | None) -> list[Transition]:
    """One for each action: where the environment had ended before, the others changed nothing."""
    found = [] if outcome is None else list(outcome.transitions[: len(rollout.actions)])
    following = replace(found[-1], messages=(), reward=0.0, num_calls=0) if found else Transition()
    return found + [following] * (len(rollout.actions) - len(found))
