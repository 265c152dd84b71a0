"""The tasks of a virtual swarm: char problems, each made once for all nodes of the process.

Invariant: what is kept is what `CharEnvironment` would make again: a function of configuration and number alone.
"""

from functools import cache

from swarm.config import EnvironmentConfig
from swarm.simulate.virtual_scale import VIRTUAL_ENVIRONMENTS
from swarm.tasks.base import NumberedEnvironment, Problem
from swarm.tasks.char import CharEnvironment
from swarm.tasks.held_out import is_held_out
from swarm.types import Message, Task


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
        found = self._kept.get(task_id)
        if found is None:
            problem = super().problem(task_id)
            question = self.config.prompt.replace("{question}", problem.question)
            chat = (Message(role="user", content=question),)
            task = Task(env=self.name, task_id=task_id, messages=chat, is_held_out=is_held_out(problem.question))
            found = self._kept[task_id] = problem, task
        return found


@cache  # for all runs of a process
def kept_environments() -> dict[str, NumberedEnvironment]:
    """The environments of every virtual swarm, by name."""
    return {config.name: KeptEnvironment(config) for config in VIRTUAL_ENVIRONMENTS}
