"""Base classes of environments: numbered problems, the chat that asks them, held-out questions, episodes.

Invariant: a problem is a pure function of (configuration, task id), so that every node rebuilds the same one. An
environment of single answers only makes the problem (`build`) and judges an answer (`judge`); one of several turns
makes the problem and an `Episode` of it (`begin`).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.episode import OUTCOME, Action, Message, Transition
from swarm.errors import ConfigError, described
from swarm.flow import BoundedTable
from swarm.interfaces import Episode
from swarm.types import Task

_HELD_OUT_BELOW = 0x40  # a quarter of the 256 values of a digest's first byte
_CACHED_PROBLEMS = 256
_UTF8: Final = ("utf-8", "surrogatepass")
ANSWER_CPU_S: Final = 0.05


def is_held_out(question: str) -> bool:
    """True for a quarter of all questions, which no node trains on: SHA-256 (UTF-8) in the lowest quarter.

    It depends on the text alone, so every node holds out the same questions whatever its seed, and two task ids with
    one question fall on the same side.
    """
    return hashlib.sha256(question.encode(*_UTF8)).digest()[0] < _HELD_OUT_BELOW


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question with its right answer; `entry` is whatever else its verifier needs."""

    question: str
    reference: str
    entry: Any = None
    initial_state: str = ""  # all that the number draws as text; empty where the question says it

    @property
    def is_held_out(self) -> bool:
        """By what the number draws: two numbers that draw the same fall on the same side."""
        return is_held_out(self.initial_state or self.question)


class NumberedEnvironment(ABC):
    """An `interfaces.Environment` over task ids 0..num_tasks-1; keeps the last 256 problems it built."""

    answer_cpu_s = ANSWER_CPU_S  # that taking one action may take, seconds of CPU without the building of its problem
    max_turns = 1  # most actions of an episode
    signals: frozenset[str] = frozenset()  # what its transitions say besides the outcome: some of `load.SIGNALS`

    def __init__(self, config: EnvironmentConfig, verifier: str, num_tasks: int | None = None) -> None:
        """`num_tasks`: how many problems exist where that is fewer than the configuration asks for."""
        if "{question}" not in config.prompt:
            raise ConfigError(f"environment {config.name}: prompt {config.prompt!r} must contain {{question}}")
        self.name = config.name
        self.verifier = verifier
        self.config = config
        self.num_tasks = config.num_tasks if num_tasks is None else min(config.num_tasks, num_tasks)
        self._problems = BoundedTable[int, Problem](_CACHED_PROBLEMS)

    def task(self, task_id: int) -> Task:
        """The problem with that number as a chat. Raises LookupError outside 0..num_tasks-1."""
        problem = self.problem(task_id)
        messages = self.opening(problem)
        return Task(
            env=self.name,
            task_id=task_id,
            messages=messages,
            is_held_out=problem.is_held_out,
            max_turns=self.max_turns,
            drawn=problem.initial_state and hashlib.sha256(problem.initial_state.encode(*_UTF8)).hexdigest(),
        )

    def episode(self, task_id: int) -> Episode:
        """A new try at that problem. Raises LookupError."""
        return self.begin(self.problem(task_id))

    def reference(self, task_id: int) -> str:
        """The right answer as text. Raises LookupError."""
        return self.problem(task_id).reference

    def problem(self, task_id: int) -> Problem:
        """The problem with that number. Raises LookupError, and ConfigError where `build` raises."""
        if not 0 <= task_id < self.num_tasks:
            raise LookupError(f"environment {self.name}: task {task_id} is outside 0..{self.num_tasks - 1}")
        problem = self._problems.get(task_id) or self._built(task_id)
        self._problems[task_id] = problem
        return problem

    def _built(self, task_id: int) -> Problem:
        try:
            return self.build(task_id)
        except Exception as error:
            if isinstance(error, ConfigError) or type(error) is LookupError:  # its kinds are mistakes of `build`
                raise
            origin = f"environment {self.name}: task {task_id} of 0..{self.num_tasks - 1} cannot be built"
            raise ConfigError(f"{origin}: {described(error)}") from error

    def opening(self, problem: Problem) -> tuple[Message, ...]:
        """The chat before the first action: system message, question in its prompt, and prefill, as configured."""
        messages = [Message(role="system", content=self.config.system)] if self.config.system else []
        messages.append(Message(role="user", content=self.config.prompt.replace("{question}", problem.question)))
        if self.config.prefill:
            messages.append(Message(role="assistant", content=self.config.prefill))
        return tuple(messages)

    @abstractmethod
    def build(self, task_id: int) -> Problem:
        """Makes the problem; `task_id` is within range. Draws from a generator seeded by configuration and number."""

    @abstractmethod
    def begin(self, problem: Problem) -> Episode:
        """A new try at a problem. Nothing that an episode does may change the problem or another episode."""


class AnswerEnvironment(NumberedEnvironment):
    """Environment of single answers: the episode ends after one action, judged without the white space around it."""

    def begin(self, problem: Problem) -> Episode:
        """The question is asked; the answer ends it."""
        return _Answer(self, problem)

    @abstractmethod
    def judge(self, problem: Problem, answer: str) -> float:
        """Reward of the stripped answer, clipped to [0, 1] by the caller. May run hostile text."""

    def rewards(self, problem: Problem, answer: str) -> Mapping[str, float]:
        """Named rewards of the stripped answer, the outcome among them. May run hostile text."""
        return {OUTCOME: float(self.judge(problem, answer))}


@dataclass(frozen=True, slots=True)
class _Answer:
    """The episode of a single answer."""

    environment: AnswerEnvironment
    problem: Problem

    def step(self, action: Action) -> Transition:
        return Transition(is_end=True, rewards=self.environment.rewards(self.problem, action.text.strip()))
