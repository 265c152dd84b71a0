"""Checks of a group's form: everything that can be decided without a replay, from the group, vocabulary and limits.

Invariant: each text is encoded once, however many checks need its tokens, and the result states the CPU time of the
checks, for which the group's party pays.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from swarm.episode import Message
from swarm.exchange.checks.admission_limits import AdmissionLimits, Finding, first
from swarm.exchange.checks.episode_checks import check_cut, check_episodes, most_chars
from swarm.exchange.checks.reward_recheck import cut_group
from swarm.exchange.novelty import AnswerKey, hash_answers
from swarm.interfaces import Result, Tokenizer
from swarm.types import (
    FinishReason,
    IntArray,
    RefusalReason,
    Rollout,
    RolloutGroup,
    Sampling,
    Task,
    TokenTrace,
)

ROUNDING_NATS: Final = 1e-4  # a log-prob this far above 0 is rounding and is clamped
_LEAST_LOGPROB: Final = -100.0  # e ** -100: no sampler ever draws such a token
_TEMPERATURE_TOLERANCE: Final = 1e-3  # relative; it travels as float32


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupForm:
    """Result of `read_group`: the finding, the group as it is learned from, and the keys of its answers."""

    finding: Finding
    learned: RolloutGroup  # cut as a batch cuts its texts, if its form is right
    answers: list[AnswerKey]  # [G] of the whole group; empty if its form is wrong
    learned_answers: list[AnswerKey]  # [G] of `learned`; empty if its form is wrong
    tokenizer: Tokenizer  # ours, with the texts that it encoded
    cpu_s: float


class EncodedOnce:
    """A `Tokenizer` that encodes equal responses once: form, cut and replay of a group encode the same texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.digest, self.vocab_size, self.eos_ids = tokenizer.digest, tokenizer.vocab_size, tokenizer.eos_ids
        self._tokenizer = tokenizer
        self._ids_of: dict[str, list[int]] = {}

    def encode_prompt(self, task: Task) -> list[int]:
        return self._tokenizer.encode_prompt(task)

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        return self._tokenizer.encode_observation(messages, is_ended)

    def encode_response(self, text: str) -> list[int]:
        """Returns the ids of a text as the wrapped tokenizer does; callers must not change the shared list."""
        ids = self._ids_of.get(text)
        if ids is None:
            ids = self._ids_of[text] = self._tokenizer.encode_response(text)
        return ids

    def byte_lengths(self, text: str) -> list[int]:
        return self._tokenizer.byte_lengths(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


def read_group(group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> GroupForm:
    """Checks the form of another node's group; if it is right, also cuts the texts and hashes the answers."""
    began_s = time.thread_time()
    once = EncodedOnce(tokenizer)
    finding = check_form(group, once, limits)
    learned, answers, learned_answers = group, list[AnswerKey](), list[AnswerKey]()
    if finding is None:
        learned = cut_group(group, once)
        answers = learned_answers = hash_answers(group)
        if learned is not group:
            learned_answers = hash_answers(learned)
    return GroupForm(
        finding=finding,
        learned=learned,
        answers=answers,
        learned_answers=learned_answers,
        tokenizer=once,
        cpu_s=time.thread_time() - began_s,
    )


def timed(function: Callable[..., Result], /, *arguments: object) -> tuple[Result, float]:
    """Returns a function's result, and the CPU seconds of this thread that the call took."""
    began_s = time.thread_time()
    result = function(*arguments)
    return result, time.thread_time() - began_s


def check_form(group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> Finding:
    """Returns the first fault in a group's form; None without one."""
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
        return _check_tokens(group, traces, tokenizer) or _check_answers(group, traces, tokenizer)
    return finding or _check_reencoded(group, tokenizer, limits)


def _check_sampled(group: RolloutGroup, limits: AdmissionLimits) -> Finding:
    samplings = {id(rollout.sampling): rollout.sampling for rollout in group.rollouts}.values()  # mostly one
    return first(_check_sampling(sampling, limits) for sampling in samplings) or first(
        _check_finish(rollout, limits, is_episode=group.env in limits.episode_environments)
        for rollout in group.rollouts
    )


def _check_finish(rollout: Rollout, limits: AdmissionLimits, *, is_episode: bool) -> Finding:
    if rollout.finish is FinishReason.ABORTED:
        return RefusalReason.BAD_SAMPLING, "an aborted rollout"
    if rollout.finish is FinishReason.LENGTH and not is_episode:
        return _check_cut_off(
            len(rollout.text.encode()) if rollout.trace is None else rollout.trace.token_ids.size, limits
        )
    return None


def _check_traces(group: RolloutGroup, traces: Sequence[TokenTrace]) -> Finding:
    """Checks spans, byte lengths and log-probs, without a vocabulary: foreign ids are never looked up here."""
    return first(
        _check_spans(trace, group.policy_id) or _check_byte_lengths("".join(rollout.actions), trace)
        for rollout, trace in zip(group.rollouts, traces, strict=bool(traces))
    ) or _check_logprobs(traces)


def _check_answers(group: RolloutGroup, traces: Sequence[TokenTrace], tokenizer: Tokenizer) -> Finding:
    """Checks texts against tokens of our vocabulary: decoded text, end of sequence, and usual number of tokens."""
    return first(
        _check_text(rollout.text, trace, tokenizer) or _check_end(rollout, trace, tokenizer)
        for rollout, trace in zip(group.rollouts, traces, strict=True)
    ) or check_cut(group, tokenizer)


def _check_sampling(sampling: Sampling, limits: AdmissionLimits) -> Finding:
    """Checks that temperature and length limit are those of the run, and that all other parameters are in range."""
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


# One call of numpy costs as much for an answer as for a whole group, so these functions check all answers at once.


def _check_length(traces: Sequence[TokenTrace], limits: AdmissionLimits) -> Finding:
    """Checks that the model chose every token of single answers, in one turn of 1 to `max_new_tokens` tokens."""
    sizes = [trace.token_ids.size for trace in traces]
    if min(sizes) < 1 or max(sizes) > limits.max_new_tokens:
        return RefusalReason.BAD_TOKENS, f"{min(sizes)} to {max(sizes)} tokens, expected 1 to {limits.max_new_tokens}"
    is_chosen = np.concatenate([trace.action_mask for trace in traces])
    if not is_chosen.all() or np.concatenate([trace.turn_ids for trace in traces]).any():
        return RefusalReason.BAD_TOKENS, "tokens that the model did not choose, or several turns, in a single answer"
    return None


def _check_cut_off(most_tokens: int, limits: AdmissionLimits) -> Finding:
    """Checks that an answer that was cut off can have `max_new_tokens` tokens; a token has at least one byte."""
    if most_tokens < limits.max_new_tokens:
        return RefusalReason.BAD_TOKENS, f"cut off after {most_tokens} tokens or fewer of {limits.max_new_tokens}"
    return None


def _check_end(rollout: Rollout, trace: TokenTrace, tokenizer: Tokenizer) -> Finding:
    """Checks that an answer that ended has an end token: without one, a policy would learn never to stop."""
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
    """Checks that texts are not too long and survive encoding here; texts of too many tokens are cut later."""
    longest, most = max(len(rollout.text) for rollout in group.rollouts), most_chars(limits.max_new_tokens)
    if longest > most:
        return RefusalReason.UNUSABLE_TEXT, f"{longest} characters exceed {most}"
    for rollout in group.rollouts:  # a character unknown here would be learned as a different one
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
    """Checks that the byte lengths of the tokens add up to the text; only the producer's tokenizer could check each."""
    if trace.byte_lengths is None:
        return None
    total, expected = int(trace.byte_lengths.sum(dtype=np.int64)), len(text.encode())
    return (RefusalReason.BAD_TOKENS, f"byte lengths add up to {total}, not {expected}") if total != expected else None


def _check_text(text: str, trace: TokenTrace, tokenizer: Tokenizer) -> Finding:
    """Checks that the learned tokens decode to the scored text."""
    if tokenizer.decode(trace.token_ids.tolist()) != text:
        return RefusalReason.TEXT_MISMATCH, "the tokens do not decode to the text"
    return None
