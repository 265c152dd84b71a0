"""Own questions chosen by what earlier ones were rewarded: which, how often, and again until it is enough.

Invariant: what is asked at a number follows from the sequence of candidates, the seed and the rewards of the
rounds before it. What is remembered is on disk, before and after a round, before the round's first group leaves.
"""

import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from swarm.errors import ConfigError, RolloutFailed
from swarm.interfaces import Offload, PromptChooser, Verdict
from swarm.types import RolloutGroup, Task

logger = logging.getLogger(__name__)

NUM_CANDIDATES = 16  # of one question
_NEXT_ROUND = 1 << 40  # added to a question's number each time it is answered again, so that new samples are drawn

Answer = Callable[[Sequence[Task], int, Sequence[int]], list[RolloutGroup]]  # blocking; tasks, responses, numbers
Score = Callable[[str, int, Sequence[str]], Awaitable[Verdict]]  # environment, task id, answers


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What was remembered when the question of a number was about to be asked."""

    number: int
    memory: Mapping[str, Any]


class AdaptiveCurriculum:
    """Asks rounds of questions.

    Args:
        chooser: the recipe's.
        candidates: tasks of the training sequence by first number and count; NUM_CANDIDATES belong to each question.
        answer: makes one group for each task.
        score: the sandboxed verifier. Raises RolloutFailed.
        offload: runs what blocks.
        path: file of what is remembered.
        seed: of the choices.
        group_size: mean number of responses.
        largest: most responses of one group, >= group_size.
    """

    def __init__(
        self,
        *,
        chooser: PromptChooser,
        candidates: Callable[[int, int], list[Task]],
        answer: Answer,
        score: Score,
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
        self._score = score
        self._offload = offload
        self._path = path
        self._seed = seed
        self._group_size = group_size
        self._largest = largest
        self._states = _read(path, repr(chooser)) or [_State(number=0, memory=chooser.initial())]

    async def ask(self, first: int, count: int) -> list[RolloutGroup]:
        """The groups of `count` questions from number `first` on, in order.

        Called again with the same `first` (after a kill) it chooses the same questions again.
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
            for place in list(wanted):
                rewards[place] = found = await self._rewards(_present(groups[place]))
                wanted[place] = self._chooser.missing(found, self._group_size, self._largest) if found else 0
            wanted = {place: missing for place, missing in wanted.items() if missing > 0}
        after = memory
        for key, found in zip(keys, rewards, strict=True):
            after = self._chooser.seen(after, key, found) if found else after
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
        """Makes or lengthens the groups at some places by so many responses."""
        for size in sorted(set(wanted.values())):
            places = [place for place, missing in wanted.items() if missing == size]
            asked, their_numbers = [tasks[place] for place in places], [numbers[place] for place in places]
            made = await self._offload(self._answer, asked, size, their_numbers)
            for place, group in zip(places, made, strict=True):
                earlier = groups[place]
                groups[place] = (
                    group if earlier is None else replace(group, rollouts=(*earlier.rollouts, *group.rollouts))
                )

    def _choose(self, memory: Mapping[str, Any], first: int, count: int) -> list[Task]:
        """One task for each number; the same one twice in a round only where no candidate is left."""
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
        """Of every response; none where they cannot be scored, and the group then counts for nothing."""
        try:
            verdict = await self._score(group.env, group.task_id, [rollout.text for rollout in group.rollouts])
        except RolloutFailed as error:
            logger.warning("a group could not be scored when it was made", extra={"error": str(error)})
            return ()
        return [float(reward) for reward in verdict.rewards]


def key_of(task: Task) -> str:
    """The name of a prompt, equal for equal tasks."""
    return f"{task.env}/{task.task_id}"


def _present(group: RolloutGroup | None) -> RolloutGroup:
    assert group is not None
    return group


def _read(path: Path, chooser: str) -> list[_State]:
    """What is remembered; nothing where the file is of a chooser with other constants."""
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
    """Replaces the file, whole or not at all."""
    data = {"chooser": chooser, "states": [{"number": each.number, "memory": each.memory} for each in states]}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
