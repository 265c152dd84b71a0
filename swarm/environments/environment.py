"""Base classes of environments: numbered problems, the chat that asks them, held-out questions, episodes.

Invariant: a problem is a pure function of (configuration, task id), so that every node rebuilds the same one. An
environment of single answers implements `build` and `judge`; an environment of several turns implements `build` and
`begin`.
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
    """True if the SHA-256 of a question (UTF-8) is in the lowest quarter; no node trains on these questions.

    The result depends on the text alone, so every node holds out the same questions whatever its seed, and two task
    ids with the same question get the same result.
    """
    return hashlib.sha256(question.encode(*_UTF8)).digest()[0] < _HELD_OUT_BELOW


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question with its right answer; `entry` holds whatever else its environment needs."""

    question: str
    reference: str
    entry: Any = None
    initial_state: str = ""  # everything drawn for the task id, as text; "" if the question shows all of it

    @property
    def is_held_out(self) -> bool:
        """True if the problem is for evaluation only, decided by `initial_state` or, if that is "", by the question."""
        return is_held_out(self.initial_state or self.question)


class NumberedEnvironment(ABC):
    """An `interfaces.Environment` over task ids 0..num_tasks-1; caches the problems used last."""

    answer_cpu_s = ANSWER_CPU_S  # CPU seconds that one action may take, without the building of its problem
    max_turns = 1  # most actions of an episode
    signals: frozenset[str] = frozenset()  # that its transitions give besides the outcome: some of `load.SIGNALS`

    def __init__(self, config: EnvironmentConfig, verifier: str, num_tasks: int | None = None) -> None:
        """Raises ConfigError if the prompt lacks {question}; `num_tasks`, if given, caps the configured number."""
        if "{question}" not in config.prompt:
            raise ConfigError(f"environment {config.name}: prompt {config.prompt!r} must contain {{question}}")
        self.name = config.name
        self.verifier = verifier
        self.config = config
        self.num_tasks = config.num_tasks if num_tasks is None else min(config.num_tasks, num_tasks)
        self._problems = BoundedTable[int, Problem](_CACHED_PROBLEMS)

    def task(self, task_id: int) -> Task:
        """The problem `task_id` as a chat. Raises as `problem`."""
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
        """A new episode of the problem `task_id`. Raises as `problem`."""
        return self.begin(self.problem(task_id))

    def reference(self, task_id: int) -> str:
        """The right answer to the problem `task_id`, as text. Raises as `problem`."""
        return self.problem(task_id).reference

    def problem(self, task_id: int) -> Problem:
        """The problem `task_id`. Raises LookupError if there is none, ConfigError if `build` raises another error."""
        if not 0 <= task_id < self.num_tasks:
            raise LookupError(f"environment {self.name}: task {task_id} is outside 0..{self.num_tasks - 1}")
        problem = self._problems.get(task_id) or self._built(task_id)
        self._problems[task_id] = problem
        return problem

    def _built(self, task_id: int) -> Problem:
        try:
            return self.build(task_id)
        except Exception as error:
            if isinstance(error, ConfigError) or type(error) is LookupError:  # its subclasses are mistakes of `build`
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
        """Builds problem `task_id` from configuration and this number alone. Raises LookupError if there is none."""

    @abstractmethod
    def begin(self, problem: Problem) -> Episode:
        """Starts a new episode of the problem. No episode may change the problem or another episode."""


class AnswerEnvironment(NumberedEnvironment):
    """Environment of single answers: an episode ends after one action, judged without surrounding white space."""

    def begin(self, problem: Problem) -> Episode:
        """Starts an episode that ends with its first action."""
        return _Answer(self, problem)

    @abstractmethod
    def judge(self, problem: Problem, answer: str) -> float:
        """Reward of the stripped answer, which may be hostile text; the caller clips an episode's reward to [0, 1]."""

    def rewards(self, problem: Problem, answer: str) -> Mapping[str, float]:
        """Named rewards of the stripped answer, which may be hostile text; by default the outcome alone."""
        return {OUTCOME: float(self.judge(problem, answer))}


@dataclass(frozen=True, slots=True)
class _Answer:
    """The episode of a single answer."""

    environment: AnswerEnvironment
    problem: Problem

    def step(self, action: Action) -> Transition:
        return Transition(is_end=True, rewards=self.environment.rewards(self.problem, action.text.strip()))
