"""Builders of rollouts, outcomes and scored groups for episodes that no environment has played.

Invariant: every action is one turn, and observation tokens are off the action mask.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swarm.episode import OUTCOME, EpisodeOutcome, Message, Transition
from swarm.interfaces import Tokenizer
from swarm.testing.builders import ToyTokenizer, make_group, make_rollout, make_scored
from swarm.types import Correction, Rollout, RolloutGroup, ScoredGroup, TokenTrace


def make_turns(turns: Sequence[tuple[str, str]], *, policy_id: str, tokenizer: Tokenizer | None = None) -> Rollout:
    """A rollout of (action, observation) turns: an end token follows each action; "" is no observation."""
    tokenizer = tokenizer or ToyTokenizer()
    ids: list[int] = []
    mask: list[bool] = []
    turn_ids: list[int] = []
    for turn, (action, observation) in enumerate(turns):
        acted, seen = tokenizer.encode_response(action), tokenizer.encode_response(observation)[:-1]
        ids += [*acted, *seen]
        mask += [True] * len(acted) + [False] * len(seen)
        turn_ids += [turn] * (len(acted) + len(seen))
    single = make_rollout(turns[-1][0], policy_id=policy_id, tokenizer=tokenizer)
    assert single.trace is not None
    action_mask = np.array(mask, np.bool_)
    trace = TokenTrace(
        token_ids=np.array(ids, np.int32),
        action_mask=action_mask,
        logprobs=np.where(action_mask, np.float32(-1), np.float32(np.nan)),
        turn_ids=np.array(turn_ids, np.int16),
        spans=single.trace.spans,
    )
    return replace(single, actions=tuple(action for action, _ in turns), trace=trace)


def make_outcome(
    reward: float,
    *,
    observations: Sequence[str] = ("",),
    turn_rewards: Sequence[float] | None = None,
    state_keys: Sequence[str] | None = None,
    **named: float,
) -> EpisodeOutcome:
    """Outcome of an episode with one turn per observation; the last turn is the end and has the `named` rewards."""
    last = len(observations) - 1
    rewards = [0.0] * len(observations) if turn_rewards is None else list(turn_rewards)
    keys = [""] * len(observations) if state_keys is None else list(state_keys)
    transitions = tuple(
        Transition(
            messages=(Message(role="user", content=text),) if text else (),
            is_end=turn == last,
            reward=rewards[turn],
            rewards={OUTCOME: reward, **named} if turn == last else {},
            state_key=keys[turn],
        )
        for turn, text in enumerate(observations)
    )
    return EpisodeOutcome(reward=reward, transitions=transitions)


def make_turns_group(*rollouts: Rollout, task_id: int = 7, tokenizer: Tokenizer | None = None) -> RolloutGroup:
    """A group of `rollouts`, made by the first test identity."""
    group = make_group(task_id=task_id, tokenizer=tokenizer)
    return replace(group, rollouts=rollouts)


def make_scored_episodes(
    *outcomes: EpisodeOutcome, correction: Correction = Correction.EXACT, task_id: int = 7
) -> ScoredGroup:
    """A scored group of one rollout for each outcome; the actions of its turns are a, b, c and so on."""
    policy_id = make_group().producer
    rollouts = [
        make_turns(
            [
                ("abcdefghij"[turn % 10], "".join(message.content for message in each.messages))
                for turn, each in enumerate(outcome.transitions)
            ],
            policy_id=policy_id,
        )
        for outcome in outcomes
    ]
    group = make_turns_group(*rollouts, task_id=task_id)
    scored = make_scored(group, rewards=[outcome.reward for outcome in outcomes], correction=correction)
    return replace(scored, outcomes=outcomes)
