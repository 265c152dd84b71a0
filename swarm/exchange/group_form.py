"""Form of a group, its texts as tokens of ours, its answers: all that is read of letters before an episode is replayed.

Invariant: each text is encoded once, however many checks ask, and what was computed says how much CPU it took, so that
its party pays for it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.episode import Message
from swarm.exchange.admission_checks import AdmissionLimits, check_form
from swarm.exchange.episode_checks import Finding
from swarm.exchange.novelty import AnswerKey, hash_answers
from swarm.exchange.reward_recheck import cut_group
from swarm.interfaces import Result, Tokenizer
from swarm.types import RolloutGroup, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupForm:
    """What a group says by itself."""

    finding: Finding
    learned: RolloutGroup  # as far as a batch takes its texts, where its form is right
    answers: list[AnswerKey]  # [G], of the group and
    learned_answers: list[AnswerKey]  # of `learned`; none where its form is wrong
    tokenizer: Tokenizer  # ours, which knows the texts that it encoded
    cpu_s: float


class EncodedOnce:
    """A `Tokenizer` that encodes equal texts once: form, cut and replay of a group ask for the same ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.digest, self.vocab_size, self.eos_ids = tokenizer.digest, tokenizer.vocab_size, tokenizer.eos_ids
        self._tokenizer = tokenizer
        self._ids_of: dict[str, list[int]] = {}

    def encode_prompt(self, task: Task) -> list[int]:
        return self._tokenizer.encode_prompt(task)

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        return self._tokenizer.encode_observation(messages, is_ended)

    def encode_response(self, text: str) -> list[int]:
        """As the tokenizer; nobody changes what it returns."""
        ids = self._ids_of.get(text)
        if ids is None:
            ids = self._ids_of[text] = self._tokenizer.encode_response(text)
        return ids

    def byte_lengths(self, text: str) -> list[int]:
        return self._tokenizer.byte_lengths(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


def read_group(group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> GroupForm:
    """Form and cut of a group of another node."""
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
    """What a function returns, and the CPU seconds of this thread that it took."""
    began_s = time.thread_time()
    result = function(*arguments)
    return result, time.thread_time() - began_s
