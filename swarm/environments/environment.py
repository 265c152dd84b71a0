"""Base class of environments: numbered problems, the chat that asks them, held-out questions, rewards in [0, 1].

Invariant: a problem is a pure function of (configuration, task id), so that every node rebuilds the same one. A
subclass only makes the problem (`build`) and judges an answer (`judge`).
"""

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.errors import ConfigError
from swarm.flow import BoundedTable
from swarm.types import Message, Task

_HELD_OUT_BELOW = 0x40  # a quarter of the 256 values of a digest's first byte
_CACHED_PROBLEMS = 256
ANSWER_CPU_S: Final = 0.05


def is_held_out(question: str) -> bool:
    """True for a quarter of all questions, which no node trains on: SHA-256 (UTF-8) in the lowest quarter.

    It depends on the text alone, so every node holds out the same questions whatever its seed, and two task ids with
    one question fall on the same side.
    """
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[0] < _HELD_OUT_BELOW


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question with its right answer; `entry` is whatever else its verifier needs."""

    question: str
    reference: str
    entry: Any = None


class NumberedEnvironment(ABC):
    """An `interfaces.Environment` over task ids 0..num_tasks-1; keeps the last 256 problems it built."""

    answer_cpu_s = ANSWER_CPU_S  # that judging one answer may take, seconds of CPU without the building of its problem

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
        question = self.problem(task_id).question
        messages = [Message(role="user", content=self.config.prompt.replace("{question}", question))]
        if self.config.prefill:
            messages.append(Message(role="assistant", content=self.config.prefill))
        return Task(env=self.name, task_id=task_id, messages=tuple(messages), is_held_out=is_held_out(question))

    def reward(self, task_id: int, answer: str) -> float:
        """Reward in [0, 1]; an answer is judged without the white space around it. Raises LookupError."""
        value = float(self.judge(self.problem(task_id), answer.strip()))
        return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0

    def reference(self, task_id: int) -> str:
        """The right answer as text. Raises LookupError."""
        return self.problem(task_id).reference

    def problem(self, task_id: int) -> Problem:
        """The problem with that number. Raises LookupError."""
        if not 0 <= task_id < self.num_tasks:
            raise LookupError(f"environment {self.name}: task {task_id} is outside 0..{self.num_tasks - 1}")
        problem = self._problems.get(task_id) or self.build(task_id)
        self._problems[task_id] = problem
        return problem

    @abstractmethod
    def build(self, task_id: int) -> Problem:
        """Makes the problem; `task_id` is within range."""

    @abstractmethod
    def judge(self, problem: Problem, answer: str) -> float:
        """What the stripped answer is worth; the caller clips it. May run hostile text."""
