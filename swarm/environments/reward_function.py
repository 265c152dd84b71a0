"""Rewards from a function of the user: `score(question, answer, reference) -> float`.

Invariant: the function comes from this node's own configuration; it is called in the sandbox like every
other verifier, because the answers may come from peers.
"""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import cast

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.jsonl import open_records
from swarm.errors import ConfigError
from swarm.plugins import load_object

_PARAMS = frozenset({"path", "split", "question", "answer"})

Score = Callable[[str, str, str], float]


class FunctionEnvironment(NumberedEnvironment):
    """Problems of a JSONL file (params.path), judged by the function that `config.dataset` names.

    The function gets the question, the stripped answer and the reference ("" where the file has none).
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError: the function or the problems cannot be loaded."""
        unknown = sorted(set(config.params) - _PARAMS)
        if unknown:
            raise ConfigError(f"environment {config.name}: unknown param {unknown[0]!r}; known: {sorted(_PARAMS)}")
        if not config.params.get("path"):
            raise ConfigError(f"environment {config.name}: params.path must name the .jsonl file of problems")
        score = load_object(config.dataset)
        if not callable(score):
            raise ConfigError(f"environment {config.name}: {config.dataset} is not a function")
        self._score = cast("Score", score)
        count, self._record = open_records(config, str(config.params["path"]))
        self._question_key = str(config.params.get("question", "question"))
        self._answer_key = str(config.params.get("answer", "answer"))
        super().__init__(config, f"function-{_source_digest(score)}/1", count)

    def build(self, task_id: int) -> Problem:
        record = self._record(task_id)
        if self._question_key not in record:
            raise LookupError(f"environment {self.name}: record {task_id} has no field {self._question_key!r}")
        return Problem(question=str(record[self._question_key]), reference=str(record.get(self._answer_key, "")))

    def judge(self, problem: Problem, answer: str) -> float:
        return float(self._score(problem.question, answer, problem.reference))


def _source_digest(score: object) -> str:
    """First hex digits of the SHA-256 of the file that defines the function: equal code, equal name."""
    try:
        source = Path(inspect.getfile(cast("Score", score))).read_bytes()
    except (TypeError, OSError):
        return "builtin"
    return hashlib.sha256(source).hexdigest()[:16]
