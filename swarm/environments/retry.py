"""Retry: any environment of single answers, asked again after a wrong answer, with or without a hint.

Invariant: the wrapped environment alone judges each answer, on a fresh episode, and decides which tasks are held out. A
hint depends only on the right answer and the last answer given; with `ask` always, the reply does not depend on the
answer.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import ANSWER_CPU_S
from swarm.environments.params import Params, verifier_name
from swarm.episode import OUTCOME, Action, Actions, Message, Transition
from swarm.errors import ConfigError
from swarm.interfaces import Environment
from swarm.types import Task

HINTS: Final = ("none", "length", "first", "order")
ASKS: Final = ("wrong", "always")
_EXAMPLE_CANDIDATES: Final = 64  # tasks searched for examples
_NUM_EXAMPLES: Final = 3
_NUM_LOOKED_AT: Final = 24  # tasks whose right answers are compared
_MOST_GUESSED: Final = 0.75  # largest mean outcome of guessing one answer after another: knowledge must earn more
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?", re.ASCII)


class RetryEnvironment:
    """Environment of several tries at one question, until the answer is right or `max_turns` are used up.

    Params: `inner` (section of the wrapped environment, which asks single answers), `max_turns` (3) tries, `hint`
    (none, length, first character, order: higher or lower, for numbers), `example` (none, chat: two other questions
    before the asked one, the first with a wrong answer and its correction), `discount` (1.0, factor of the outcome for
    each try after the first), `ask` (wrong: again after a wrong answer; always: after every answer, and the last one
    counts), `style` (text, or char in the alphabet of the tiny model; by default that of the inner kind).
    Rewards: those of the inner environment for the last answer, the outcome discounted; `first_try`, the outcome of
    the first answer; `attempts`, the number of answers (not with ask = always).
    """

    def __init__(self, config: EnvironmentConfig, inner: Environment) -> None:
        """Wraps `inner`, built from `config.inner`. Raises ConfigError for params that are invalid or do not fit it."""
        where = f"environment {config.name}"
        own = config.model_copy(update={"params": {k: v for k, v in config.params.items() if k != "inner"}})
        params = Params(own)
        self.max_turns = params.turns(3)
        self.signals = frozenset({"state_keys", "reward_parts"})
        self.hint = params.choice("hint", "none", HINTS)
        self.discount = params.number("discount", 1.0, 0.0, 1.0)
        self.asks_always = params.choice("ask", "wrong", ASKS) == "always"
        is_char = config.inner is not None and config.inner.kind == "char"
        self.style = params.choice("style", "char" if is_char else "text", ("char", "text"))
        has_example = params.choice("example", "none", ("none", "chat")) == "chat"
        params.finish()
        if has_example and (self.style == "char" or (config.inner is not None and config.inner.prefill)):
            raise ConfigError(f"{where}: params.example writes whole answers as text: no style char, and no prefill")
        if self.asks_always and (self.hint != "none" or has_example or self.discount < 1.0):
            raise ConfigError(f"{where}: params.ask = always says nothing of answers: no hint, no example, no discount")
        if config.prompt != "{question}" or config.prefill:
            raise ConfigError(f"{where}: kind retry: set prompt and prefill in params.inner")
        if inner.max_turns != 1:
            raise ConfigError(f"{where}: kind retry wraps single answers; {inner.verifier} has {inner.max_turns} turns")
        num_answers = _num_answers(inner)
        tries = range(1 if self.asks_always else int(min(self.max_turns, num_answers)))
        guessed = sum(self.discount**number for number in tries) / num_answers
        if len(tries) > 1 and guessed > _MOST_GUESSED:
            raise ConfigError(
                f"{where}: {self.max_turns} tries at questions with {num_answers} different answers pay a guesser "
                f"{guessed:.2f} of the outcome, at most {_MOST_GUESSED}; lower params.discount ({self.discount:g}) or "
                "params.max_turns"
            )
        self.name = config.name
        self.config = config
        self.inner = inner
        self.num_tasks = inner.num_tasks
        self.verifier = f"{verifier_name(own, 1)}+{inner.verifier}"  # the latter covers the inner section
        self.answer_cpu_s = float(getattr(inner, "answer_cpu_s", ANSWER_CPU_S))
        self._examples = self._find_examples() if has_example else ()  # built once: every prompt shows two of them

    def task(self, task_id: int) -> Task:
        """The task of the inner environment, with the example, if any, before its chat. Raises as the inner `task`."""
        task = self.inner.task(task_id)
        return replace(task, messages=(*self._worked(task), *task.messages), max_turns=self.max_turns)

    def _find_examples(self) -> "tuple[_Example, ...]":
        """Finds _NUM_EXAMPLES tasks with different answers, one more than a chat shows. Raises ConfigError if fewer."""
        found: dict[str, _Example] = {}
        for task_id in range(min(self.num_tasks, _EXAMPLE_CANDIDATES)):
            with suppress(LookupError):  # a record without its field
                task, answer = self.inner.task(task_id), self.inner.reference(task_id)
                if answer and not task.is_held_out:
                    found.setdefault(answer, _Example(task_id, task.messages, answer))
        if len(found) < _NUM_EXAMPLES:
            raise ConfigError(f"environment {self.name}: params.example needs {_NUM_EXAMPLES} different answers")
        return tuple(found.values())[:_NUM_EXAMPLES]

    def _worked(self, asked: Task) -> tuple[Message, ...]:
        """Two worked questions, one answered wrongly and then rightly, one rightly; () if there are no examples."""
        if not self._examples:
            return ()
        first, second = [each for each in self._examples if each.messages != asked.messages][:2]
        correction = Attempts(self, first.task_id, first.answer).correction(second.answer)
        say = partial(Message, role="assistant")
        corrected = (*first.messages, say(content=second.answer), correction, say(content=first.answer))
        return (*corrected, *second.messages, say(content=second.answer))

    def episode(self, task_id: int) -> "Attempts":
        """A new series of tries. Raises as the inner `reference`."""
        return Attempts(self, task_id, self.inner.reference(task_id))

    def reference(self, task_id: int) -> str:
        """The right answer. Raises as the inner `reference`."""
        return self.inner.reference(task_id)

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn the full outcome: the right answer, repeated if `ask` is always. Raises as `reference`."""
        return (self.reference(task_id),) * (self.max_turns if self.asks_always else 1)


@dataclass(frozen=True, slots=True)
class _Example:
    """A question that prompts show with its answer."""

    task_id: int
    messages: tuple[Message, ...]
    answer: str


def _num_answers(inner: Environment) -> float:
    """Number of different right answers among the first _NUM_LOOKED_AT tasks; infinity if there are fewer tasks."""
    if inner.num_tasks < _NUM_LOOKED_AT:
        return math.inf
    answers: set[str] = set()
    for task_id in range(_NUM_LOOKED_AT):
        with suppress(LookupError):  # a record without its field
            answers.add(inner.reference(task_id))
    return len(answers) or math.inf


class Attempts:
    """Answers to one question until one is right, or the tries are used up."""

    def __init__(self, environment: RetryEnvironment, task_id: int, right: str) -> None:
        self._environment = environment
        self._task_id = task_id
        self._right = right
        self._num_attempts = 0
        self._first = 0.0

    def step(self, action: Action) -> Transition:
        """Ends the episode after `max_turns` answers or, unless `ask` is always, a right answer; else asks again."""
        retry = self._environment
        judged = retry.inner.episode(self._task_id).step(action)
        value = min(max(judged.rewards.get(OUTCOME, 0.0), 0.0), 1.0)
        self._num_attempts += 1
        if self._num_attempts == 1:
            self._first = value
        if (value >= 1.0 and not retry.asks_always) or self._num_attempts >= retry.max_turns:
            rewards = {
                **judged.rewards,
                OUTCOME: value * retry.discount ** (self._num_attempts - 1),
                "first_try": self._first,
            }
            if not retry.asks_always:
                rewards["attempts"] = float(self._num_attempts)
            return Transition(is_end=True, rewards=rewards, status=judged.status, state_key="end")
        said = self.check() if retry.asks_always else self.correction(action.text.strip())
        return Transition(messages=(said,), status=judged.status, state_key=f"{self._num_attempts}:{said.content}")

    def check(self) -> Message:
        """Message after an answer, right or wrong, if every answer is asked again."""
        asked = self._environment.inner.task(self._task_id).messages[-1].content
        is_char = self._environment.style == "char"
        return Message(role="user", content=asked if is_char else "Is that right? Check it, and answer once more.")

    def correction(self, wrong: str) -> Message:
        """Message after a wrong answer, with the hint."""
        hint = self._hint(wrong)
        is_char = self._environment.style == "char"
        return Message(role="user", content=f"no{hint}=" if is_char else f"No, that is wrong.{hint} Try again.")

    def _hint(self, answer: str) -> str:
        right, is_char = self._right, self._environment.style == "char"
        if not right:
            return ""
        match self._environment.hint:
            case "length":
                return f"{len(right)}" if is_char else f" The answer has {len(right)} characters."
            case "first":
                return f":{right[0]}" if is_char else f" The answer begins with {right[0]!r}."
            case "order" if (
                _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(right) and Decimal(answer) != Decimal(right)
            ):
                is_higher = Decimal(right) > Decimal(answer)
                if is_char:
                    return "+" if is_higher else "-"
                return f" The answer is {'higher' if is_higher else 'lower'}."
            case _:
                return ""
