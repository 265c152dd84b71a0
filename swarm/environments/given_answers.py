"""Right answers for a supervised warm-up: the references of a run's environments, or a file.

Invariant: the sequence has no held-out question, and follows from configuration and seed.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from swarm.config import EnvironmentConfig, NodeConfig
from swarm.environments.curriculum import TaskMixture
from swarm.environments.jsonl import RecordEnvironment
from swarm.errors import ConfigError
from swarm.interfaces import Environment, Tokenizer
from swarm.types import Task

REFERENCES: Final = "references"  # value of warm_up.answers


class GivenAnswers:
    """Endless numbered sequence of training questions with their right answers, for episodes of one answer.

    Example:
        pairs = GivenAnswers(config, environments, held_out=(), tokenizer=tokenizer).pairs(0, 16)
    """

    def __init__(
        self,
        config: NodeConfig,
        environments: Mapping[str, Environment],
        held_out: Iterable[Task],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Opens the source that `warm_up.answers` names (blocking).

        Args:
            config: configuration of the node.
            environments: environments of the run, by name.
            held_out: tasks of evaluations; their questions are left out, even if a file has them.
            tokenizer: of the model; answers that it cannot write, or that are longer than `generator.max_new_tokens`,
                are left out. None: no answer is left out.

        Raises:
            ConfigError: the file cannot be read, or no environment has single answers.
        """
        if not config.environments:
            raise ConfigError("warm_up.answers: there is no environment whose questions it could be about")
        self.are_tasks = config.warm_up.answers == REFERENCES  # of the run, which the verifier can score
        self._held_out, self._tokenizer = {task.messages for task in held_out}, tokenizer
        self._longest = config.generator.max_new_tokens
        weights = config.generator.env_weights
        if self.are_tasks:
            single = {name: each for name, each in environments.items() if each.max_turns == 1 and weights.get(name, 1)}
            if not single:
                raise ConfigError(
                    'warm_up.answers = "references": every environment has several turns, of which no reference says '
                    "what to do; leave it empty"
                )
            self._environments = single
        else:
            own = _of_file(config.warm_up.answers, config.environments[0])
            self._environments = {own.name: own}
        mix = {name: share for name, share in weights.items() if name in self._environments} if self.are_tasks else {}
        self._tasks = TaskMixture(self._environments, mix, config.seed)

    def pairs(self, first: int, count: int) -> list[tuple[Task, str]]:
        """At most `count` tasks with their answers, from number `first` on. Raises as `TaskMixture.tasks`."""
        tasks = [task for task in self._tasks.tasks(first, count) if task.messages not in self._held_out]
        pairs = [(task, self._environments[task.env].reference(task.task_id)) for task in tasks]
        return [(task, answer) for task, answer in pairs if answer and self._can_be_given(answer)]

    def _can_be_given(self, answer: str) -> bool:
        if self._tokenizer is None:
            return True
        token_ids = self._tokenizer.encode_response(answer)
        return len(token_ids) <= self._longest and self._tokenizer.decode(token_ids).strip() == answer.strip()


def _of_file(path: str, asked: EnvironmentConfig) -> Environment:
    """Environment of a file's questions, asked in the form that `asked` configures."""
    fields = {key: asked.params[key] for key in ("question", "answer") if key in asked.params}
    changes = {"kind": "jsonl", "dataset": path, "params": fields, "digest": "", "exchange": "own", "num_tasks": 10**6}
    return RecordEnvironment(asked.model_copy(update=changes))
