"""Curriculum: the choice of the next training problem, its number of responses, and the problems for evaluation.

`TaskMixture` is the weighted, endless sequence of training tasks; `AdaptiveCurriculum` chooses among them by the
rewards of earlier groups, for recipes that have a prompt chooser.

Invariant: training never sees a held-out problem, and every choice follows from the seed, in an adaptive curriculum
also from earlier rewards. An adaptive curriculum tries to write its memory to disk before it returns a round's groups.
"""

import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from swarm.episode import Actions, Message
from swarm.errors import ConfigError, RolloutFailed
from swarm.flow import BoundedTable
from swarm.interfaces import Environment, Offload, PromptChooser, Verdict
from swarm.types import RolloutGroup, Task

logger = logging.getLogger(__name__)

SPACING = 64  # numbers between two appearances of a question, if the environment has enough questions
NUM_CANDIDATES = 16  # tasks of the training sequence that an adaptive curriculum chooses one from

_MAX_REFUSALS = 10_000  # at a held-out share of 1/4 this many in a row means that nothing else exists
_MAX_CANDIDATES = 32  # drawn before the one farthest from its other appearances is taken
_KEPT_SEGMENTS = 4  # a segment, its two neighbours, and one more
_NEXT_ROUND = 1 << 40  # added to a question's number each time it is answered again, so that new samples are drawn

Question = tuple[str, tuple[Message, ...], str]  # `Task.problem`: different task ids can hold the same question
Answer = Callable[[Sequence[Task], int, Sequence[int]], list[RolloutGroup]]  # blocking; tasks, responses, numbers
Verify = Callable[[str, int, Sequence[Actions]], Awaitable[Verdict]]  # environment, task id, actions of each episode


class TaskMixture:
    """Weighted, endless, numbered sequence of training tasks, with random access.

    A question comes again within `spacing` numbers only if _MAX_CANDIDATES draws from the chosen environment give no
    other, as in an environment with few questions; then the drawn question farthest from its other appearances is
    taken. The sequence is made in segments of twice the spacing: even ones independently, odd ones so that they fit
    between their neighbours.

    Example:
        mixture = TaskMixture(build_environments(configs), {"sums": 2.0, "products": 1.0}, seed=0)
        first_four = mixture.tasks(0, 4)
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        weights: Mapping[str, float],
        seed: int,
        spacing: int = SPACING,
    ) -> None:
        """Weighs all environments equally if `weights` is empty. Raises ConfigError for a wrong name or weight."""
        assert spacing > 0, spacing
        self._environments = dict(environments)
        mix = dict(weights) or dict.fromkeys(self._environments, 1.0)
        unknown = sorted(set(mix) - set(self._environments))
        if unknown:
            raise ConfigError(
                f"generator.env_weights: unknown environment {unknown[0]!r}; known: {sorted(self._environments)}"
            )
        if not mix or any(weight < 0 for weight in mix.values()) or sum(mix.values()) <= 0:
            raise ConfigError(f"generator.env_weights: weights must be >= 0 with a positive sum, got {mix}")
        self._names = sorted(mix)
        self._weights = [mix[name] for name in self._names]
        self._seed = seed
        self._spacing = spacing
        self._segments = BoundedTable[int, list[Task]](_KEPT_SEGMENTS)
        self._next = 0

    def task(self, number: int) -> Task:
        """Task `number` >= 0 of the sequence. Raises as `Environment.task`; ConfigError if every draw is held out."""
        assert number >= 0, number
        index, offset = divmod(number, 2 * self._spacing)
        return self._segment(index)[offset]

    def tasks(self, first: int, count: int) -> list[Task]:
        """The `count` tasks from number `first` on. Raises as `task`."""
        return [self.task(number) for number in range(first, first + count)]

    def next_task(self) -> Task:
        """The next task of the sequence; number 0 at the first call. Raises as `task`."""
        self._next += 1
        return self.task(self._next - 1)

    def _segment(self, index: int) -> list[Task]:
        if index not in self._segments:
            around = _Appearances(self._spacing, 2 * self._spacing)
            if index % 2:
                around.add(self._segment(index - 1), -2 * self._spacing)
                around.add(self._segment(index + 1), 2 * self._spacing)
            source = random.Random(f"mixture:{self._seed}:{index}")
            segment: list[Task] = []
            for offset in range(2 * self._spacing):
                task = self._choose(source, around, offset)
                around.add([task], offset)
                segment.append(task)
            self._segments[index] = segment
        return self._segments[index]

    def _choose(self, source: random.Random, around: "_Appearances", offset: int) -> Task:
        """The first candidate far enough from its other appearances, or else the farthest of _MAX_CANDIDATES."""
        (name,) = source.choices(self._names, self._weights)
        best, best_distance = None, -1
        for _ in range(_MAX_CANDIDATES):
            candidate = self._candidate(source, self._environments[name])
            distance = around.distance(candidate, offset)
            if distance > best_distance:
                best, best_distance = candidate, distance
            if distance >= self._spacing:
                break
        assert best is not None
        return best

    @staticmethod
    def _candidate(source: random.Random, environment: Environment) -> Task:
        for _ in range(_MAX_REFUSALS):
            task = environment.task(source.randrange(environment.num_tasks))
            if not task.is_held_out:
                return task
        raise ConfigError(f"environment {environment.name}: every problem drawn is held out; give it more problems")


@dataclass(slots=True)
class _Appearances:
    """Offsets of each question's last appearance before the end of a segment, and of its first appearance after it."""

    spacing: int
    length: int  # of the segment
    last: dict[Question, int] = field(default_factory=dict[Question, int])
    following: dict[Question, int] = field(default_factory=dict[Question, int])

    def add(self, tasks: Sequence[Task], start: int) -> None:
        """Records tasks at offsets from `start` on; the segment has offsets 0..length-1, its neighbours all others."""
        for offset, task in enumerate(tasks, start):
            if offset < self.length:
                self.last[task.problem] = offset
            else:
                self.following.setdefault(task.problem, offset)

    def distance(self, task: Task, offset: int) -> int:
        """Number of offsets between `offset` and the nearest appearance of the question, at most `spacing`."""
        before = offset - self.last.get(task.problem, offset - self.spacing)
        after = self.following.get(task.problem, offset + self.spacing) - offset
        return min(before, after, self.spacing)


def evaluation_tasks(env: Environment, split: Literal["held_out", "all"], num: int, seed: int) -> list[Task]:
    """Up to `num` different problems, the same for equal arguments on every node. Raises as `env.task`.

    Returns:
        Fewer than `num` problems if min(16 num + 256, all) task ids, drawn at random, give no more of that split.
    """
    source = random.Random(f"evaluation:{env.name}:{split}:{seed}")
    chosen: dict[Question, Task] = {}
    for task_id in source.sample(range(env.num_tasks), min(16 * num + 256, env.num_tasks)):
        task = env.task(task_id)
        if split == "all" or task.is_held_out:
            chosen.setdefault(task.problem, task)
        if len(chosen) == num:
            break
    return list(chosen.values())


# --- adaptive ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Memory of the prompt chooser before question `number` is chosen."""

    number: int
    memory: Mapping[str, Any]


class AdaptiveCurriculum:
    """Adaptive curriculum: rounds of questions chosen by the rewards of earlier rounds.

    Args:
        chooser: prompt chooser of the recipe.
        candidates: (first number, count) -> tasks of the training sequence; NUM_CANDIDATES for each question.
        answer: makes one group for each task (blocking).
        verify: sandboxed verifier; the chooser does not see a group for which it raises RolloutFailed.
        offload: runs blocking functions.
        path: file of the chooser's memory; ConfigError if it is not JSON.
        seed: seed of the choices.
        group_size: mean number of responses.
        largest: bound of the responses of one group, >= group_size.
    """

    def __init__(
        self,
        *,
        chooser: PromptChooser,
        candidates: Callable[[int, int], list[Task]],
        answer: Answer,
        verify: Verify,
        offload: Offload,
        path: Path,
        seed: int,
        group_size: int,
        largest: int,
    ) -> None:
        assert largest >= group_size, (largest, group_size)
        self._chooser = chooser
        self._candidates = candidates
        self._answer = answer
        self._verify = verify
        self._offload = offload
        self._path = path
        self._seed = seed
        self._group_size = group_size
        self._largest = largest
        self._states = _read(path, repr(chooser)) or [_State(number=0, memory=chooser.initial())]

    async def ask(self, first: int, count: int) -> list[RolloutGroup]:
        """Answers `count` questions from number `first` on and returns their groups, in order.

        Repeating the newest call with the same arguments, also after a restart, chooses the same questions.
        """
        before = max((state for state in self._states if state.number <= first), key=lambda s: s.number, default=None)
        memory = self._chooser.initial() if before is None else before.memory
        tasks = await self._offload(self._choose, memory, first, count)
        keys = [key_of(task) for task in tasks]
        counts = self._chooser.counts(memory, keys, self._group_size, self._largest)
        numbers = range(first, first + count)
        groups: list[RolloutGroup | None] = [None] * count
        rewards: list[Sequence[float]] = [()] * count
        wanted, extra = dict(enumerate(counts)), 0
        while wanted:
            await self._round(tasks, [number + extra for number in numbers], wanted, groups)
            extra += _NEXT_ROUND
            for index in list(wanted):
                rewards[index] = scored = await self._rewards(_present(groups[index]))
                wanted[index] = self._chooser.missing(scored, self._group_size, self._largest) if scored else 0
            wanted = {index: missing for index, missing in wanted.items() if missing > 0}
        after = memory
        for key, scored in zip(keys, rewards, strict=True):
            after = self._chooser.seen(after, key, scored) if scored else after
        self._states = [_State(number=first, memory=memory), _State(number=first + count, memory=after)]
        await self._offload(_write, self._path, repr(self._chooser), self._states)
        return [_present(group) for group in groups]

    async def _round(
        self,
        tasks: Sequence[Task],
        numbers: Sequence[int],
        wanted: Mapping[int, int],
        groups: list[RolloutGroup | None],
    ) -> None:
        """Makes `wanted[index]` responses for each index, and adds them to the group of an earlier round, if any."""
        for size in sorted(set(wanted.values())):
            indices = [index for index, missing in wanted.items() if missing == size]
            made = await self._offload(
                self._answer, [tasks[index] for index in indices], size, [numbers[index] for index in indices]
            )
            for index, group in zip(indices, made, strict=True):
                earlier = groups[index]
                groups[index] = (
                    group if earlier is None else replace(group, rollouts=(*earlier.rollouts, *group.rollouts))
                )

    def _choose(self, memory: Mapping[str, Any], first: int, count: int) -> list[Task]:
        """Chooses one task for each number; a task repeats only if all candidates of its number are chosen already."""
        chosen: list[Task] = []
        for number in range(first, first + count):
            tasks = self._candidates(number * NUM_CANDIDATES, NUM_CANDIDATES)
            taken = {key_of(task) for task in chosen}
            fresh = [task for task in tasks if key_of(task) not in taken] or tasks
            odds = self._chooser.odds(memory, [key_of(task) for task in fresh])
            weights = odds if sum(odds) > 0 else [1.0] * len(fresh)
            chosen += random.Random(f"chosen:{self._seed}:{number}").choices(fresh, weights)
        return chosen

    async def _rewards(self, group: RolloutGroup) -> Sequence[float]:
        """Reward of every response; () if they cannot be scored, so that the chooser ignores the group."""
        try:
            verdict = await self._verify(group.env, group.task_id, [rollout.actions for rollout in group.rollouts])
        except RolloutFailed as error:
            logger.warning("a group could not be scored when it was made", extra={"error": str(error)})
            return ()
        return [float(reward) for reward in verdict.rewards]


def key_of(task: Task) -> str:
    """Key of a task for the prompt chooser: its environment and number."""
    return f"{task.env}/{task.task_id}"


def _present(group: RolloutGroup | None) -> RolloutGroup:
    assert group is not None
    return group


def _read(path: Path, chooser: str) -> list[_State]:
    """States from the file; [] if there is none, or it is of another chooser. Raises ConfigError if it is not JSON."""
    try:
        data = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; delete it to forget what prompts were rewarded") from None
    if data["chooser"] != chooser:
        logger.warning("the choice of questions starts anew", extra={"was": data["chooser"], "now": chooser})
        return []
    return [_State(number=int(each["number"]), memory=each["memory"]) for each in data["states"]]


def _write(path: Path, chooser: str, states: Sequence[_State]) -> None:
    """Replaces the file atomically; if writing fails, the old file stays and the error is logged."""
    data = {"chooser": chooser, "states": [{"number": each.number, "memory": each.memory} for each in states]}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:  # the next batch writes all of it again
        logger.error("what prompts were rewarded was not written", extra={"file": str(path), "error": str(error)})
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
