"""Cached tasks and verdicts of a virtual swarm: each problem is made, and each answer judged, once for all nodes.

Invariant: a cached value is a function of configuration, number and answers alone.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.environments.char_tasks import CharEnvironment
from swarm.environments.environment import NumberedEnvironment, Problem, is_held_out
from swarm.flow import BoundedTable
from swarm.interfaces import Verdict
from swarm.simulate.virtual.scale import VIRTUAL_ENVIRONMENTS
from swarm.testing.inline_verifier import InlineVerifier
from swarm.types import Message, Task

MAX_VERDICTS: Final = 8192  # kept


class KeptEnvironment(CharEnvironment):
    """A char environment that keeps every problem it made: hundreds of nodes in one process ask for the same ones."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._kept: dict[int, tuple[Problem, Task]] = {}

    def problem(self, task_id: int) -> Problem:
        """The problem with that number. Raises LookupError."""
        return self._keep(task_id)[0]

    def task(self, task_id: int) -> Task:
        """The problem as a chat. Raises LookupError."""
        return self._keep(task_id)[1]

    def _keep(self, task_id: int) -> tuple[Problem, Task]:
        kept = self._kept.get(task_id)
        if kept is None:
            problem = super().problem(task_id)
            question = self.config.prompt.replace("{question}", problem.question)
            chat = (Message(role="user", content=question),)
            task = Task(env=self.name, task_id=task_id, messages=chat, is_held_out=is_held_out(problem.question))
            kept = self._kept[task_id] = problem, task
        return kept


@cache  # for all runs of a process
def kept_environments() -> dict[str, NumberedEnvironment]:
    """The environments of every virtual swarm, by name."""
    return {config.name: KeptEnvironment(config) for config in VIRTUAL_ENVIRONMENTS}


class KeptVerifier(InlineVerifier):
    """A verifier that keeps its newest verdicts: a group is judged by its producer, then by each node that takes it."""

    def __init__(self, environments: Mapping[str, NumberedEnvironment]) -> None:
        super().__init__(environments)
        self._kept = BoundedTable[tuple[str, int, tuple[str, ...]], Verdict](MAX_VERDICTS)

    async def score(self, env: str, task_id: int, answers: Sequence[str]) -> Verdict:
        """As `InlineVerifier.score`; the rewards are shared and read-only. Raises LookupError."""
        key = env, task_id, tuple(answers)
        verdict = self._kept.get(key)
        if verdict is None:
            verdict = self._kept[key] = await super().score(env, task_id, answers)
            verdict.rewards.flags.writeable = False
        return verdict
