"""Held-out runs of agents as evaluations: rounds over tasks, each compared with the first result of every task.

A round ends once all tasks of earlier rounds are measured, before a task of the round is measured again, or QUIET_S
after its last run while no held-out run is open. A task that a later round lacks counts as not scored.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from swarm.config.node_config import AGENT_RUNS
from swarm.types import Evaluation

QUIET_S: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTask:
    """A held-out task of a key, at the end of a round."""

    task: str
    first_step: int  # of the policy at the first call of the task's first run
    first_reward: float
    step: int  # of the policy at the first call of the task's newest run
    reward: float  # of that run, in [0, 1]; 1 is a success
    at_s: float  # wall clock of that reward
    num_rounds: int  # earlier rounds with this task
    is_in_round: bool


def evaluations_of(owner: str, tasks: Sequence[MeasuredTask]) -> list[Evaluation]:
    """Evaluation of a round's newest results; if a later round has new tasks, one of all first results precedes it.

    Args:
        owner: name of the key.
        tasks: all tasks of the key, in an order that only grows; at least one is in the round.
    """
    made = [each for each in tasks if each.is_in_round]
    first = [(each.task, each.first_step, each.first_reward) for each in tasks]
    newest = [(each.task, each.step if each.is_in_round else -1, each.reward) for each in tasks]
    is_begun = all(each.num_rounds == 0 for each in tasks)
    shown = [first] if is_begun else [newest] if all(each.num_rounds for each in made) else [first, newest]
    at_s = max(each.at_s for each in made)
    return [_evaluation(owner, results, at_s) for results in shown]


def _evaluation(owner: str, results: Sequence[tuple[str, int, float]], at_s: float) -> Evaluation:
    """Evaluation of (task, step, reward), with step -1 where a task was not measured."""
    scored = [(step, reward) for _, step, reward in results if step >= 0]
    is_graded = any(0 < reward < 1 for _, reward in scored)
    names = repr([task for task, _, _ in results])
    return Evaluation(
        step=max(step for step, _ in scored),
        env=f"{AGENT_RUNS}:{owner}",
        split="held_out",
        accuracy=fmean(reward >= 1 for _, reward in scored),
        num_problems=len(scored),
        majority_baseline=0.0,
        at_s=at_s,
        num_right=tuple(int(reward >= 1) if step >= 0 else -1 for _, step, reward in results),
        rewards=tuple(round(reward, 4) for _, _, reward in results) if is_graded else (),
        problems=hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()[:16],
    )
