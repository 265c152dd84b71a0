"""Which problem is asked next in training, and which ones are evaluated.

Invariant: training never sees a held-out problem, and both sequences are fixed by their seed: which question
comes at a number does not depend on where a node began to ask.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarm.environments.environment import NumberedEnvironment
from swarm.errors import ConfigError
from swarm.types import Message, Task

SPACING = 64  # questions between two appearances of the same one, where the environment has enough

_MAX_REFUSALS = 10_000  # at a held-out share of 1/4 this many in a row means that nothing else exists
_MAX_CANDIDATES = 32  # looked at before the one asked longest ago is asked again
_KEPT_SEGMENTS = 4  # a segment, its two neighbours, and one more

Question = tuple[str, tuple[Message, ...]]  # environment and chat: different task ids can hold the same question


class TaskMixture:
    """A weighted, endless, numbered sequence of training tasks; any place of it can be asked for.

    The same question does not come again within `spacing` numbers, unless the environments of the mixture
    have fewer; then the one asked longest ago comes first. The sequence is made in segments of twice the
    spacing: the even ones on their own, the odd ones so that they fit between their neighbours.

    Example:
        mixture = TaskMixture(build_environments(configs), {"sums": 2.0, "products": 1.0}, seed=0)
        first_four = mixture.tasks(0, 4)
    """

    def __init__(
        self,
        environments: Mapping[str, NumberedEnvironment],
        weights: Mapping[str, float],
        seed: int,
        spacing: int = SPACING,
    ) -> None:
        """Empty `weights`: every environment equally. Raises ConfigError for unknown names or no weight."""
        assert spacing > 0, spacing
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
        self._seed = seed
        self._spacing = spacing
        self._segments: dict[int, list[Task]] = {}
        self._next = 0

    def task(self, number: int) -> Task:
        """The task at a place >= 0 of the sequence.

        Raises:
            ConfigError: an environment holds nothing but held-out problems.
        """
        assert number >= 0, number
        index, place = divmod(number, 2 * self._spacing)
        return self._segment(index)[place]

    def tasks(self, first: int, count: int) -> list[Task]:
        """The `count` tasks from place `first` on. Raises as `task`."""
        return [self.task(number) for number in range(first, first + count)]

    def next_task(self) -> Task:
        """The task after the one that the last call gave, from the beginning. Raises as `task`."""
        self._next += 1
        return self.task(self._next - 1)

    def _segment(self, index: int) -> list[Task]:
        if index not in self._segments:
            around = _Around(self._spacing, 2 * self._spacing)
            if index % 2:
                around.add(self._segment(index - 1), -2 * self._spacing)
                around.add(self._segment(index + 1), 2 * self._spacing)
            source = random.Random(f"mixture:{self._seed}:{index}")
            segment: list[Task] = []
            for place in range(2 * self._spacing):
                task = self._choose(source, around, place)
                around.add([task], place)
                segment.append(task)
            while len(self._segments) >= _KEPT_SEGMENTS:
                del self._segments[next(iter(self._segments))]
            self._segments[index] = segment
        return self._segments[index]

    def _choose(self, source: random.Random, around: "_Around", place: int) -> Task:
        """The first candidate far enough from its last appearance, or the farthest of a few."""
        (name,) = source.choices(self._names, self._weights)
        best, best_distance = None, -1
        for _ in range(_MAX_CANDIDATES):
            candidate = self._candidate(source, self._environments[name])
            distance = around.distance(candidate, place)
            if distance > best_distance:
                best, best_distance = candidate, distance
            if distance >= self._spacing:
                break
        assert best is not None
        return best

    @staticmethod
    def _candidate(source: random.Random, environment: NumberedEnvironment) -> Task:
        for _ in range(_MAX_REFUSALS):
            task = environment.task(source.randrange(environment.num_tasks))
            if not task.is_held_out:
                return task
        raise ConfigError(f"environment {environment.name}: every problem drawn is held out; give it more problems")


@dataclass(slots=True)
class _Around:
    """Where questions were asked before a place of a segment, and will be after its end."""

    spacing: int
    length: int  # of the segment
    last: dict[Question, int] = field(default_factory=dict[Question, int])
    following: dict[Question, int] = field(default_factory=dict[Question, int])

    def add(self, tasks: Sequence[Task], start: int) -> None:
        """Tasks at places from `start` on: negative ones lie before the segment, `length` is behind its end."""
        for place, task in enumerate(tasks, start):
            if place < self.length:
                self.last[task.env, task.messages] = place
            else:
                self.following.setdefault((task.env, task.messages), place)

    def distance(self, task: Task, place: int) -> int:
        """Numbers to the nearest other appearance of the question, at most `spacing`."""
        question = task.env, task.messages
        before = place - self.last.get(question, place - self.spacing)
        after = self.following.get(question, place + self.spacing) - place
        return min(before, after, self.spacing)


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
