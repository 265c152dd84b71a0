"""Which problem is asked next in training, and which ones are evaluated.

Invariant: training never sees a held-out problem, and both sequences are fixed by their seed.
"""

import random
from collections.abc import Mapping
from typing import Literal, cast

from swarm.errors import ConfigError
from swarm.tasks.base import NumberedEnvironment
from swarm.types import JsonDict, Task

_MAX_REFUSALS = 10_000  # at a held-out share of 1/4 this many in a row means that nothing else exists


class TaskMixture:
    """A weighted, endless sequence of training tasks, drawn with replacement.

    Example:
        mixture = TaskMixture(build_environments(configs), {"sums": 2.0, "products": 1.0}, seed=0)
    """

    def __init__(
        self, environments: Mapping[str, NumberedEnvironment], weights: Mapping[str, float], seed: int
    ) -> None:
        """Empty `weights`: every environment equally. Raises ConfigError for unknown names or no weight."""
        self._environments = dict(environments)
        asked = dict(weights) or dict.fromkeys(self._environments, 1.0)
        unknown = sorted(set(asked) - set(self._environments))
        if unknown:
            raise ConfigError(
                f"generator.asks: unknown environment {unknown[0]!r}; known: {sorted(self._environments)}"
            )
        if not asked or any(weight < 0 for weight in asked.values()) or sum(asked.values()) <= 0:
            raise ConfigError(f"generator.asks: weights must be >= 0 with a positive sum, got {asked}")
        self._names = sorted(asked)
        self._weights = [asked[name] for name in self._names]
        self._random = random.Random(f"mixture:{seed}")

    def next_task(self) -> Task:
        """The next training task. Raises ConfigError when an environment holds nothing but held-out problems."""
        (name,) = self._random.choices(self._names, self._weights)
        environment = self._environments[name]
        for _ in range(_MAX_REFUSALS):
            task = environment.task(self._random.randrange(environment.num_tasks))
            if not task.is_held_out:
                return task
        raise ConfigError(f"environment {name}: every problem drawn is held out; give it more problems")

    def state(self) -> JsonDict:
        """The position in the sequence as plain JSON, for a checkpoint."""
        version, internal, gauss = self._random.getstate()
        return {"version": version, "internal": list(internal), "gauss": gauss}

    def restore(self, state: JsonDict) -> None:
        """Continues where `state()` was taken. Raises ConfigError when it is not such a state."""
        try:
            internal = tuple(int(word) for word in cast("list[int]", state["internal"]))
            self._random.setstate((state["version"], internal, state["gauss"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"task mixture: not a saved state ({error}); start without it") from error


def evaluation_tasks(env: NumberedEnvironment, split: Literal["held_out", "all"], num: int, seed: int) -> list[Task]:
    """Up to `num` problems with different questions, the same for equal arguments on every node.

    Returns:
        Fewer than `num` where the environment has no more (found) different questions of that split.
    """
    source = random.Random(f"evaluation:{env.name}:{split}:{seed}")
    chosen: dict[tuple[str, ...], Task] = {}
    for task_id in _candidates(source, env.num_tasks, 16 * num + 256):
        task = env.task(task_id)
        if split == "all" or task.is_held_out:
            chosen.setdefault(tuple(message.content for message in task.messages), task)
        if len(chosen) == num:
            break
    return list(chosen.values())


def _candidates(source: random.Random, num_tasks: int, limit: int) -> list[int]:
    return source.sample(range(num_tasks), min(limit, num_tasks))
