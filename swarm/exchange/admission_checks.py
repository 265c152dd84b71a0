"""The pure checks of admission: one function per rule, each returning what is wrong or None.

Invariant: no check trusts a length, a number or a name of a group beyond what `open_group` established,
and none reveals prompt or answer text in its detail.

Shape letters: G rollouts, P prompt tokens, T response tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from swarm.config import NodeConfig
from swarm.episode import MAX_TURNS
from swarm.exchange.episode_checks import Finding, check_cut, check_episodes, most_chars
from swarm.interfaces import Tokenizer
from swarm.types import (
    EpisodeLimits,
    FinishReason,
    IntArray,
    RefusalReason,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenTrace,
)
from swarm.wire.group_counts import CountLimits

ROUNDING_NATS: Final = 1e-4  # a log-prob this far above 0 is rounding and is clamped
_LEAST_LOGPROB: Final = -100.0  # e ** -100: no sampler ever draws such a token
_TEMPERATURE_TOLERANCE: Final = 1e-3  # relative; it travels as float32


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """The bounds of admission."""

    max_group_bytes: int = 4 * 2**20  # as it travels and decompressed
    group_size: int = 8  # rollouts, exactly
    largest_group: int = 0  # 0, or groups have any size from 2 to this
    max_age_steps: int = 4
    max_age_s: float = 600.0  # since the producer's created_at, clock skew allowed on top
    max_new_tokens: int = 8  # tokens of one answer, and what its generator was allowed
    temperature: float = 1.0  # of the run
    reward_tolerance: float = 1e-3
    has_followers: bool = False  # others have our weights, and make groups with them
    episode_environments: frozenset[str] = frozenset()  # names of those whose episodes may have several turns
    max_episode_tokens: int = 2048  # of such an episode
    believed_from: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """environment whose observations are believed -> the nodes whose are"""
    own_environments: frozenset[str] = frozenset()  # names of those whose episodes stay where they were made

    @classmethod
    def from_config(cls, config: NodeConfig) -> "AdmissionLimits":
        """The limits a node's configuration implies."""
        return cls(
            max_group_bytes=config.exchange.max_group_bytes,
            group_size=config.generator.group_size,
            largest_group=config.generator.largest_group,
            max_age_steps=config.replay.max_age_steps,
            max_age_s=config.replay.max_age_s,
            max_new_tokens=config.generator.max_new_tokens,
            temperature=config.generator.temperature,
            has_followers=config.weights.publish,
            episode_environments=frozenset(each.name for each in config.environments if each.may_have_turns),
            max_episode_tokens=config.generator.max_episode_tokens,
            believed_from={e.name: frozenset(e.scored_from) for e in config.environments if e.exchange == "scored"},
            own_environments=config.own_environments,
        )

    @property
    def episodes(self) -> EpisodeLimits:
        """Where episodes of several turns end."""
        return EpisodeLimits(max_new_tokens=self.max_new_tokens, max_episode_tokens=self.max_episode_tokens)

    @property
    def counts(self) -> CountLimits:
        """What a group may hold at all: the rest is not parsed."""
        return CountLimits.of_run(
            group_size=max(self.group_size, self.largest_group),
            max_new_tokens=self.max_episode_tokens if self.episode_environments else self.max_new_tokens,
            max_turns=MAX_TURNS if self.episode_environments else 1,
            max_age_steps=self.max_age_steps,
        )


def check_form(group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> Finding:
    """Everything that group, vocabulary and limits decide alone."""
    least, most = (2, limits.largest_group) if limits.largest_group else (limits.group_size,) * 2
    if not least <= len(group.rollouts) <= most:
        return RefusalReason.WRONG_GROUP_SIZE, f"{len(group.rollouts)} rollouts, expected {least} to {most}"
    traces = [rollout.trace for rollout in group.rollouts if rollout.trace is not None]
    if len(traces) not in (0, len(group.rollouts)):
        return RefusalReason.MALFORMED, "some rollouts have a trace and some have none"
    finding = _check_sampled(group, limits)
    if group.env in limits.episode_environments:
        return finding or check_episodes(group, tokenizer, limits.episodes) or _check_traces(group, traces)
    if any(len(rollout.actions) != 1 for rollout in group.rollouts):
        return RefusalReason.BAD_TOKENS, "several turns in a single answer"
    if finding is None and traces:
        finding = _check_length(traces, limits) or _check_traces(group, traces)
    if finding is None and traces and group.tokenizer_digest == tokenizer.digest:
        return _check_tokens(group, traces, tokenizer) or _check_answers(group, tokenizer)
    return finding or _check_reencoded(group, tokenizer, limits)


def _check_sampled(group: RolloutGroup, limits: AdmissionLimits) -> Finding:
    for sampling in {id(rollout.sampling): rollout.sampling for rollout in group.rollouts}.values():  # mostly one
        finding = _check_sampling(sampling, limits)
        if finding is not None:
            return finding
    for rollout in group.rollouts:
        if rollout.finish is FinishReason.ABORTED:
            return RefusalReason.BAD_SAMPLING, "an aborted rollout"
        if rollout.finish is FinishReason.LENGTH and group.env not in limits.episode_environments:
            most = len(rollout.text.encode()) if rollout.trace is None else rollout.trace.token_ids.size
            finding = _check_cut_off(most, limits)
            if finding is not None:
                return finding
    return None


def _check_traces(group: RolloutGroup, traces: Sequence[TokenTrace]) -> Finding:
    """What needs no vocabulary: ids of another one are never looked up here."""
    for rollout, trace in zip(group.rollouts, traces, strict=bool(traces)):
        finding = _check_spans(trace, group.policy_id) or _check_byte_lengths("".join(rollout.actions), trace)
        if finding is not None:
            return finding
    return _check_logprobs(traces)


def _check_answers(group: RolloutGroup, tokenizer: Tokenizer) -> Finding:
    """Text against tokens of our vocabulary."""
    for rollout in group.rollouts:
        assert rollout.trace is not None
        finding = _check_text(rollout.text, rollout.trace, tokenizer) or _check_end(rollout, rollout.trace, tokenizer)
        if finding is not None:
            return finding
    return check_cut(group, tokenizer)


def _check_sampling(sampling: Sampling, limits: AdmissionLimits) -> Finding:
    """Sampling is as the run has it: objectives weigh by length limits, and gradients grow as a temperature falls."""
    if not abs(sampling.temperature - limits.temperature) <= _TEMPERATURE_TOLERANCE * limits.temperature:  # NaN too
        return RefusalReason.BAD_SAMPLING, f"temperature {sampling.temperature}, here {limits.temperature}"
    if sampling.max_new_tokens != limits.max_new_tokens:
        allowed = sampling.max_new_tokens
        return RefusalReason.BAD_SAMPLING, f"max_new_tokens {allowed} at its maker, {limits.max_new_tokens} here"
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or not 0 < sampling.repetition_penalty <= 10:
        return RefusalReason.BAD_SAMPLING, "top_p, top_k or repetition_penalty out of range"
    return None


def _check_spans(trace: TokenTrace, policy_id: str) -> Finding:
    newest_step = 0
    for span in trace.spans:
        if span.version.policy_id != policy_id:
            return RefusalReason.BAD_VERSION, "a span of another lineage than the group's"
        if span.version.step < newest_step:
            return RefusalReason.BAD_VERSION, "steps of the spans go back"
        newest_step = span.version.step
    return None


# One call of numpy costs as much for an answer as for all of a group, so those below look at all answers at once.


def _check_length(traces: Sequence[TokenTrace], limits: AdmissionLimits) -> Finding:
    """Single answers: the model chose every token, so that no row is longer than prompt and `max_new_tokens`."""
    sizes = [trace.token_ids.size for trace in traces]
    if min(sizes) < 1 or max(sizes) > limits.max_new_tokens:
        return RefusalReason.BAD_TOKENS, f"{min(sizes)} to {max(sizes)} tokens, expected 1 to {limits.max_new_tokens}"
    is_chosen = np.concatenate([trace.action_mask for trace in traces])
    if not is_chosen.all() or np.concatenate([trace.turn_ids for trace in traces]).any():
        return RefusalReason.BAD_TOKENS, "tokens that the model did not choose, or several turns, in a single answer"
    return None


def _check_cut_off(most_tokens: int, limits: AdmissionLimits) -> Finding:
    """What was cut off has all the tokens that it may have; a text stands for a byte of each at least."""
    if most_tokens < limits.max_new_tokens:
        return RefusalReason.BAD_TOKENS, f"cut off after {most_tokens} tokens or fewer of {limits.max_new_tokens}"
    return None


def _check_end(rollout: Rollout, trace: TokenTrace, tokenizer: Tokenizer) -> Finding:
    """What says that it ended has its end: of answers without it a policy learns never to stop."""
    if rollout.finish is FinishReason.STOP and int(trace.token_ids[-1]) not in tokenizer.eos_ids:
        return RefusalReason.BAD_TOKENS, "ended without an end of sequence"
    return None


def _check_tokens(group: RolloutGroup, traces: Sequence[TokenTrace], tokenizer: Tokenizer) -> Finding:
    if not _are_in_vocabulary(group.prompt_ids, tokenizer):
        return RefusalReason.BAD_TOKENS, f"token id of the prompt outside [0, {tokenizer.vocab_size})"
    if not _are_in_vocabulary(np.concatenate([trace.token_ids for trace in traces]), tokenizer):
        return RefusalReason.BAD_TOKENS, f"token id outside [0, {tokenizer.vocab_size})"
    if not all(tokenizer.eos_ids.isdisjoint(trace.token_ids[:-1].tolist()) for trace in traces):
        return RefusalReason.BAD_TOKENS, "tokens after an end of sequence"  # no sampler goes on there
    return None


def _check_reencoded(group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> Finding:
    """Texts that are encoded here say what they say; what has too many tokens is cut off later (`cut_to_limit`)."""
    longest, most = max(len(rollout.text) for rollout in group.rollouts), most_chars(limits.max_new_tokens)
    if longest > most:
        return RefusalReason.UNUSABLE_TEXT, f"{longest} characters exceed {most}"
    for rollout in group.rollouts:  # a character unknown here would be learned as another
        if tokenizer.decode(tokenizer.encode_response(rollout.text)) != rollout.text:
            return RefusalReason.UNUSABLE_TEXT, "the text has characters that are lost here"
    return None


def _are_in_vocabulary(ids: IntArray, tokenizer: Tokenizer) -> bool:
    # Seen as unsigned, a negative id is a huge one.
    return not ids.size or int(np.maximum.reduce(ids.view(np.uint32))) < tokenizer.vocab_size


def _check_logprobs(traces: Sequence[TokenTrace]) -> Finding:
    known = [trace.logprobs[trace.action_mask] for trace in traces if trace.logprobs is not None]
    if not known:
        return None
    values = np.concatenate(known)
    least, largest = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))  # both NaN when one value is
    if not (math.isfinite(least) and math.isfinite(largest)):
        return RefusalReason.BAD_LOGPROBS, "a log-prob that is not finite"
    if largest > ROUNDING_NATS or least < _LEAST_LOGPROB:
        return RefusalReason.BAD_LOGPROBS, f"log-probs outside [{_LEAST_LOGPROB}, {ROUNDING_NATS}]"
    return None


def _check_byte_lengths(text: str, trace: TokenTrace) -> Finding:
    """The tokens that stand for a text stand for all of it; which for what, only its tokenizer could tell."""
    if trace.byte_lengths is None:
        return None
    total, expected = int(trace.byte_lengths.sum(dtype=np.int64)), len(text.encode())
    return (RefusalReason.BAD_TOKENS, f"byte lengths add up to {total}, not {expected}") if total != expected else None


def _check_text(text: str, trace: TokenTrace, tokenizer: Tokenizer) -> Finding:
    """What is scored is what is learned: every token shows in the text."""
    if tokenizer.decode(trace.token_ids.tolist()) != text:
        return RefusalReason.TEXT_MISMATCH, "the tokens do not decode to the text"
    return None
