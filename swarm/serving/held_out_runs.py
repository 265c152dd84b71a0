"""Held-out runs of agents in rounds over the same tasks; each round is an `Evaluation`, as of held-out problems.

A round ends once all tasks of earlier rounds are measured, before a task of the round is measured again, or QUIET_S
after its last run while no held-out run is open. A task that a later round lacks counts as not scored.
"""

import hashlib
import threading
from collections.abc import Container
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from swarm.config.node_config import AGENT_RUNS
from swarm.types import MAX_OUTCOMES, Evaluation

QUIET_S: Final = 30.0


@dataclass(slots=True)
class _Tasks:
    """Held-out tasks of one key, and the round that is under way."""

    known: set[str] = field(default_factory=set[str])
    num_rounds: int = 0  # that ended
    measured: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])  # step, reward
    last_s: float = 0.0  # wall clock of the newest run


class HeldOutRuns:
    """Rounds of held-out runs, by the name of their key; an unfinished round is lost when the process ends.

    The threads of the server and of the worker call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, _Tasks] = {}
        self._ended: list[Evaluation] = []

    def add(self, owner: str, task: str, step: int, reward: float, now_s: float) -> None:
        """Adds a measured run to the round of its key.

        Args:
            owner: name of its key.
            task: name of its task; the run is ignored if the task is new and MAX_OUTCOMES tasks are known.
            step: policy step at its first call.
            reward: in [0, 1]; 1 is a success.
            now_s: wall clock.
        """
        with self._lock:
            tasks = self._tasks.setdefault(owner, _Tasks())
            if task not in tasks.known and len(tasks.known) >= MAX_OUTCOMES:
                return
            if task in tasks.measured:
                self._end(owner, tasks)
            tasks.known.add(task)
            tasks.measured[task] = step, reward
            tasks.last_s = now_s
            if tasks.num_rounds and tasks.measured.keys() == tasks.known:
                self._end(owner, tasks)

    def ended(self, now_s: float, measuring: Container[str]) -> list[Evaluation]:
        """Rounds that ended since the last call. `measuring`: keys with held-out runs under way."""
        with self._lock:
            for owner, tasks in self._tasks.items():
                if tasks.measured and now_s >= tasks.last_s + QUIET_S and owner not in measuring:
                    self._end(owner, tasks)
            ended, self._ended = self._ended, []
        return ended

    def _end(self, owner: str, tasks: _Tasks) -> None:
        names = sorted(tasks.known)
        rewards = {task: reward for task, (_, reward) in tasks.measured.items()}
        is_graded = any(0 < reward < 1 for reward in rewards.values())
        self._ended.append(
            Evaluation(
                step=max(step for step, _ in tasks.measured.values()),
                env=f"{AGENT_RUNS}:{owner}",
                split="held_out",
                accuracy=fmean(reward >= 1 for reward in rewards.values()),
                num_problems=len(rewards),
                majority_baseline=0.0,
                at_s=tasks.last_s,
                num_right=tuple(int(rewards[name] >= 1) if name in rewards else -1 for name in names),
                rewards=tuple(round(rewards.get(name, 0.0), 4) for name in names) if is_graded else (),
                problems=hashlib.sha256(repr(names).encode()).hexdigest()[:16],
            )
        )
        tasks.measured = {}
        tasks.num_rounds += 1
