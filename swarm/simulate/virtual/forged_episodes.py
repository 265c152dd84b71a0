"""Episodes of adversaries: episodes of an honest engine with changes that only a replay reveals.

Invariant: honest admission refuses every group of these attacks in which something was changed, with a reason that
names the fault.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from swarm.episode import Actions, EpisodeOutcome, TurnStatus
from swarm.interfaces import Environment, Producer, Tokenizer, Verdict, Verifier
from swarm.types import FinishReason, Rollout, RolloutGroup, TokenTrace

CLAIMS: Final = ("forged_status", "forged_turn_reward")  # of the last turn but one; only the claim is wrong
EPISODE_ATTACKS: Final = (
    *CLAIMS,
    "forged_observation",  # one observation token is replaced
    "dropped_turn",  # an action and its observation are left out
    "other_task",  # an episode of another task of the same environment
    "early_end",  # the last action is left out: the environment goes on
    "late_end",  # one more action after the environment's end
)


def forged(
    attack: str, group: RolloutGroup, tokenizer: Tokenizer, environments: Mapping[str, Environment], rng: random.Random
) -> RolloutGroup:
    """The group as the attack changes it.

    other_task names another task; the attacks of CLAIMS change nothing here; every other attack changes each second
    episode in which it can, and leaves the rest, so that the group is worth learning from.
    """
    environment = environments[group.env]
    if attack == "other_task":
        other = rng.choice([number for number in range(64) if number != group.task_id])
        prompt_ids = np.asarray(tokenizer.encode_prompt(environment.task(other)), dtype=np.int32)
        return replace(group, task_id=other, prompt_ids=prompt_ids)
    change = {
        "forged_observation": _with_other_token,
        "dropped_turn": _without_a_turn,
        "early_end": _ended_early,
        "late_end": _ended_late,
    }.get(attack, lambda rollout, tokenizer, rng: rollout)
    rollouts = tuple(each if number % 2 else change(each, tokenizer, rng) for number, each in enumerate(group.rollouts))
    return replace(group, rollouts=rollouts)


class LyingVerifier:
    """`Verifier` of an adversary: wrong in the last turn but one of each own episode (`producer` None), else right."""

    def __init__(self, inner: Verifier, attack: str) -> None:
        """Wraps an honest verifier; `attack` is one of CLAIMS."""
        self._inner = inner
        self._attack = attack

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        verdict = await self._inner.verify(env, task_id, episodes, producer)
        if producer is not None:
            return verdict
        return replace(verdict, outcomes=tuple(self._claimed(outcome) for outcome in verdict.outcomes))

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        return await self._inner.step(env, task_id, actions)

    def _claimed(self, outcome: EpisodeOutcome) -> EpisodeOutcome:
        if len(outcome.transitions) < 2:
            return outcome
        *before, changed, last = outcome.transitions
        if self._attack == "forged_turn_reward":
            changed = replace(changed, reward=changed.reward + 0.5)
        else:
            status = TurnStatus.MALFORMED if changed.status is TurnStatus.OK else TurnStatus.OK
            changed = replace(changed, status=status)
        return replace(outcome, transitions=(*before, changed, last))


def _with_other_token(rollout: Rollout, tokenizer: Tokenizer, rng: random.Random) -> Rollout:
    trace = _trace(rollout)
    observed = np.flatnonzero(~trace.action_mask)
    if not observed.size:
        return rollout
    token_ids, at = trace.token_ids.copy(), rng.choice(observed.tolist())
    token_ids[at] = 3 + (token_ids[at] - 2) % (tokenizer.vocab_size - 3)
    return replace(rollout, trace=replace(trace, token_ids=token_ids))


def _without_a_turn(rollout: Rollout, tokenizer: Tokenizer, rng: random.Random) -> Rollout:
    if len(rollout.actions) < 2:
        return rollout
    turn = rng.randrange(len(rollout.actions) - 1)
    trace = _trace(rollout)
    kept = _kept(trace, trace.turn_ids != turn)
    kept = replace(kept, turn_ids=kept.turn_ids - (kept.turn_ids > turn).astype(np.int16))
    return replace(rollout, actions=(*rollout.actions[:turn], *rollout.actions[turn + 1 :]), trace=kept)


def _ended_early(rollout: Rollout, tokenizer: Tokenizer, rng: random.Random) -> Rollout:
    last = len(rollout.actions) - 1
    if last < 1:
        return rollout
    trace = _trace(rollout)
    kept = _kept(trace, (trace.turn_ids < last) & ((trace.turn_ids < last - 1) | trace.action_mask))
    has_end = int(kept.token_ids[-1]) in tokenizer.eos_ids
    finish = FinishReason.STOP if has_end else FinishReason.LENGTH
    return replace(rollout, actions=rollout.actions[:-1], trace=kept, finish=finish)


def _ended_late(rollout: Rollout, tokenizer: Tokenizer, rng: random.Random) -> Rollout:
    trace, added = _trace(rollout), np.asarray(tokenizer.encode_response("u"), dtype=np.int32)
    longer = replace(
        trace,
        token_ids=np.concatenate([trace.token_ids, added]),
        action_mask=np.concatenate([trace.action_mask, np.ones(added.size, np.bool_)]),
        logprobs=None if trace.logprobs is None else np.concatenate([trace.logprobs, np.full(added.size, -0.1, "f4")]),
        turn_ids=np.concatenate([trace.turn_ids, np.full(added.size, len(rollout.actions), np.int16)]),
    )
    return replace(rollout, actions=(*rollout.actions, "u"), trace=longer, finish=FinishReason.STOP)


def _kept(trace: TokenTrace, kept: np.ndarray) -> TokenTrace:
    return replace(
        trace,
        token_ids=trace.token_ids[kept],
        action_mask=trace.action_mask[kept],
        logprobs=None if trace.logprobs is None else trace.logprobs[kept],
        turn_ids=trace.turn_ids[kept],
        spans=trace.spans[:1],
    )


def _trace(rollout: Rollout) -> TokenTrace:
    assert rollout.trace is not None, "engines say which tokens they drew"
    return rollout.trace
