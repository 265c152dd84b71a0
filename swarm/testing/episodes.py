"""Builders of episodes as an honest node makes them, from actions that a test gives.

Invariant: tokens, mask and turns follow from environment and tokenizer, as in `swarm.generation.episode_player`.
"""

from collections.abc import Sequence

import numpy as np

from swarm.environments.replay import replay
from swarm.episode import Actions
from swarm.interfaces import Environment, Tokenizer
from swarm.model.conversations import Conversations
from swarm.testing.builders import TOY_NOW_S, TOY_RUN_ID
from swarm.types import (
    ClaimedTurn,
    FinishReason,
    NodeId,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenTrace,
    VersionSpan,
)


def make_episode(
    environment: Environment,
    task_id: int,
    actions: Actions,
    tokenizer: Tokenizer,
    *,
    policy_id: str,
    sampling: Sampling,
    logprob: float = -1.0,
) -> Rollout:
    """A rollout of `actions`, each ended by its end token; `logprob` is that of every action token, nats.

    Raises:
        LookupError: no such task.
        ValueError: an action follows the end of the episode.
    """
    outcome = replay(environment, task_id, actions)
    conversations = Conversations(tokenizer, environment.name)
    token_ids: list[int] = []
    mask: list[bool] = []
    turn_ids: list[int] = []
    for turn, (text, transition) in enumerate(zip(actions, outcome.transitions, strict=True)):
        chosen = tokenizer.encode_response(text)
        is_last = turn == len(actions) - 1
        observed = () if is_last else conversations.observe(transition, True).token_ids
        token_ids += [*chosen, *observed]
        mask += [True] * len(chosen) + [False] * len(observed)
        turn_ids += [turn] * (len(chosen) + len(observed))
    trace = TokenTrace(
        token_ids=np.array(token_ids, np.int32),
        action_mask=np.array(mask, np.bool_),
        logprobs=np.where(mask, np.float32(logprob), np.float32(np.nan)),
        turn_ids=np.array(turn_ids, np.int16),
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=policy_id, step=0)),),
    )
    return Rollout(
        actions=actions,
        trace=trace,
        sampling=sampling,
        finish=FinishReason.STOP,
        claimed_reward=outcome.reward,
        claimed_turns=tuple(ClaimedTurn(reward=each.reward, status=each.status) for each in outcome.transitions),
    )


def make_episode_group(
    environment: Environment,
    task_id: int,
    episodes: Sequence[Actions],
    tokenizer: Tokenizer,
    producer: NodeId,
    sampling: Sampling,
) -> RolloutGroup:
    """A group by `producer` of one task: one rollout for each of `episodes`. Raises the errors of `make_episode`."""
    return RolloutGroup(
        run_id=TOY_RUN_ID,
        producer=producer,
        policy_id=producer,
        env=environment.name,
        task_id=task_id,
        tokenizer_digest=tokenizer.digest,
        prompt_ids=np.array(tokenizer.encode_prompt(environment.task(task_id)), np.int32),
        rollouts=tuple(
            make_episode(environment, task_id, actions, tokenizer, policy_id=producer, sampling=sampling)
            for actions in episodes
        ),
        verifier=environment.verifier,
        created_at_s=TOY_NOW_S,
    )
