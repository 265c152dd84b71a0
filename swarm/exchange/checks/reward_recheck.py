"""Recheck of rewards: a producer's task, prompt and rewards against this node's verdict, and the scored group.

Invariant: the rewards of a scored group were computed on this node, whoever made the group.
Shape letters: G rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swarm.episode import OUTCOME, EpisodeOutcome
from swarm.exchange.checks.admission_limits import AdmissionLimits, Finding
from swarm.exchange.checks.episode_checks import check_believed, check_replay
from swarm.interfaces import Tokenizer, Verdict
from swarm.model.token_alignment import cut_to_limit
from swarm.types import (
    Correction,
    FloatArray,
    RefusalReason,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    SealedGroup,
)

_TEMPLATE_TOKENS = 1024  # of another model's chat template
_SHOWN_CHARS = 200  # of an environment's version, in a refusal
_PER_FOREIGN_TOKEN = 8  # most tokens of another tokenizer for one of ours: a word's characters


def cut_group(group: RolloutGroup, tokenizer: Tokenizer) -> RolloutGroup:
    """A group of another node cut as the learner cuts it, so that the learned text is the scored one.

    The same object if no text is too long, or if every rollout has tokens of our tokenizer.
    """
    if correction_of(group, tokenizer) is not Correction.TEXT_ONLY:
        return group
    rollouts = tuple(cut_to_limit(rollout, tokenizer) for rollout in group.rollouts)
    is_whole = all(cut is rollout for cut, rollout in zip(rollouts, group.rollouts, strict=True))
    return group if is_whole else replace(group, rollouts=rollouts)


def check_verdict(
    group: RolloutGroup, scored: RolloutGroup, verdict: Verdict, tokenizer: Tokenizer, limits: AdmissionLimits
) -> Finding:
    """Checks the producer's task, prompt and claimed rewards against those rebuilt here.

    A difference is its producer's fault only if both nodes have the same version of the environment.

    Args:
        group: the group as received; its claims are about uncut answers.
        scored: `cut_group` of `group`.
        verdict: verdict on the episodes of `scored`.
        tokenizer: our own.
        limits: limits of the run.
    """
    rewards: list[float] = verdict.rewards.tolist()
    if verdict.rewards.shape != (len(group.rollouts),) or not all(map(math.isfinite, rewards)):
        return RefusalReason.VERIFIER_FAILED, "the verifier gave no finite reward for each answer"
    finding = _check_against(group, scored, verdict, rewards, tokenizer, limits)
    if finding is None or finding[0] is not RefusalReason.OTHER_ENVIRONMENT:
        return finding
    here, there = ascii(verdict.verifier[:_SHOWN_CHARS]), ascii(group.verifier[:_SHOWN_CHARS])
    return finding[0], f"{finding[1]}; {group.env} is {here} here and {there} there"


def _check_against(
    group: RolloutGroup,
    scored: RolloutGroup,
    verdict: Verdict,
    rewards: Sequence[float],
    tokenizer: Tokenizer,
    limits: AdmissionLimits,
) -> Finding:
    is_same = group.verifier == verdict.verifier
    if verdict.task.is_held_out:
        return _fault(RefusalReason.HELD_OUT, is_same), f"task {group.task_id} is never trained on"
    is_ours = group.tokenizer_digest == tokenizer.digest
    prompt_ids = tokenizer.encode_prompt(verdict.task)
    if is_ours and group.prompt_ids.tolist() != prompt_ids:
        return _fault(RefusalReason.WRONG_PROMPT, is_same), "the prompt is not that of the task"
    num_tokens, most = group.prompt_ids.size, _PER_FOREIGN_TOKEN * len(prompt_ids) + _TEMPLATE_TOKENS
    if num_tokens > most:  # it is not read here, but takes memory
        return RefusalReason.UNUSABLE_TEXT, f"{num_tokens} tokens of a prompt exceed {most}"
    if is_same:
        for rollout, kept, reward in zip(group.rollouts, scored.rollouts, rewards, strict=True):
            error = abs(rollout.claimed_reward - reward)
            if kept is rollout and not error <= limits.reward_tolerance:  # catches NaN
                return RefusalReason.FALSE_REWARD, f"claim off by {error:.4f}, at most {limits.reward_tolerance}"
    if group.env in limits.believed_from:
        return check_believed(scored, verdict, tokenizer)
    if group.env in limits.episode_environments:
        return check_replay(scored, verdict, tokenizer, limits.episodes)
    return None


def _fault(reason: RefusalReason, is_same: bool) -> RefusalReason:
    """`reason` if both nodes have the same version, else OTHER_ENVIRONMENT: versions may differ in prompts."""
    return reason if is_same else RefusalReason.OTHER_ENVIRONMENT


def to_scored_group(
    group: RolloutGroup,
    sealed: SealedGroup,
    rewards: FloatArray,
    tokenizer: Tokenizer,
    *,
    is_made_here: bool,
    now_s: float,
    outcomes: Sequence[EpisodeOutcome] = (),
) -> ScoredGroup:
    """Builds the scored group that store, learner and relay work with.

    Args:
        group: content of `sealed`.
        sealed: the group as sent.
        rewards: [G], computed on this node.
        tokenizer: tokenizer of this node's model.
        is_made_here: True if this node generated the group.
        now_s: wall clock, recorded as `first_seen_s`.
        outcomes: [G], of the replay on this node; empty if only rewards are known.
    """
    correction = correction_of(group, tokenizer)
    return ScoredGroup(
        digest=sealed.digest,
        group=clamp_logprobs(group),
        rewards=rewards,
        correction=correction,
        outcomes=_kept_outcomes(outcomes, correction),
        is_made_here=is_made_here,
        first_seen_s=now_s,
        size_bytes=sealed.size_bytes,
    )


def _kept_outcomes(outcomes: Sequence[EpisodeOutcome], correction: Correction) -> tuple[EpisodeOutcome, ...]:
    """The outcomes to keep: none if they hold only rewards; with observations only if the trace lacks their tokens."""
    if all(len(outcome.transitions) < 2 and outcome.rewards.keys() <= {OUTCOME} for outcome in outcomes):
        return ()
    if correction is Correction.TEXT_ONLY:
        return tuple(outcomes)
    return tuple(
        replace(outcome, transitions=tuple(replace(each, messages=()) for each in outcome.transitions))
        for outcome in outcomes
    )


def correction_of(group: RolloutGroup, tokenizer: Tokenizer) -> Correction:
    """The kind of importance ratios that this node can form for all rollouts of a group."""
    if group.tokenizer_digest != tokenizer.digest:
        return Correction.TEXT_ONLY
    is_exact = True
    for rollout in group.rollouts:
        if rollout.trace is None:
            return Correction.TEXT_ONLY
        is_exact = is_exact and rollout.trace.logprobs is not None and rollout.sampling.is_exact
    return Correction.EXACT if is_exact else Correction.NO_LOGPROBS


def clamp_logprobs(group: RolloutGroup) -> RolloutGroup:
    """The group with log-probs above 0 (rounding) set to 0; the same object if there are none."""
    known = [r.trace.logprobs for r in group.rollouts if r.trace is not None and r.trace.logprobs is not None]
    if not known or not (np.concatenate(known) > 0).any():  # one call for all: nearly no group has any
        return group
    return replace(group, rollouts=tuple(_clamped(rollout) for rollout in group.rollouts))


def _clamped(rollout: Rollout) -> Rollout:
    trace = rollout.trace
    if trace is None or trace.logprobs is None:
        return rollout
    return replace(rollout, trace=replace(trace, logprobs=np.minimum(trace.logprobs, np.float32(0))))
