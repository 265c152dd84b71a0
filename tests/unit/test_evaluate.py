"""Held-out accuracy as the learn loop measures it: what could not be scored says nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from workers import PlainLearner, QuietExchange, make_worker

from swarm.config import EvaluationConfig, LearnerConfig, NodeConfig
from swarm.episode import Actions, EpisodeOutcome, Transition
from swarm.errors import RolloutFailed
from swarm.interfaces import Verdict
from swarm.loops.learn_loop import learn_loop
from swarm.telemetry.shown_episodes import NUM_SHOWN, ShownEpisode
from swarm.types import Evaluation, PolicyVersion, Task

NUM_PROBLEMS = 50


class BrokenSandbox(QuietExchange):
    """A node whose sandbox scores the first so many answers; 30 are right, and every other task has no reference."""

    def __init__(self, num_scored: int) -> None:
        super().__init__()
        self._num_scored = num_scored

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        if task_id >= self._num_scored:
            raise RolloutFailed("the sandbox did not start")
        outcome = EpisodeOutcome(reward=float(task_id < 30), transitions=(Transition(is_end=True),))
        task = Task(env=env, task_id=task_id, messages=())
        return Verdict(task=task, outcomes=(outcome,) * len(episodes), verifier="fake/1", reference="7" * (task_id % 2))


class DoneLearner(PlainLearner):
    """A learner that begins, is evaluated, and has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_in: list[Evaluation] = []

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        self.taken_in += evaluations
        self.version = PolicyVersion(policy_id="own", step=1)


@pytest.mark.parametrize(
    ("num_scored", "reported", "taken_in"),
    [
        (50, [(50, 0.6)], 1),
        (40, [(40, 0.75)], 1),
        (25, [(25, 1.0)], 1),
        (24, [(24, 1.0)], 0),
        (0, [], 0),
    ],
)
async def test_answers_that_could_not_be_scored_are_no_wrong_ones(
    tmp_path: Path, num_scored: int, reported: list[tuple[int, float]], taken_in: int
) -> None:
    config = NodeConfig(dir=tmp_path, learner=LearnerConfig(num_steps=1), evaluation=EvaluationConfig(every_steps=1))
    exchange, learner = BrokenSandbox(num_scored), DoneLearner()
    tasks = [Task(env="sort", task_id=number, messages=()) for number in range(NUM_PROBLEMS)]
    shown: list[ShownEpisode] = []
    worker = make_worker(
        config,
        exchange,
        learner,
        evaluation_tasks={("sort", "held_out"): tasks},
        evaluate=lambda tasks: [[("7",)]] * len(tasks),
        show=shown.extend,
    )
    await learn_loop(worker, cast(Any, learner))
    assert [(each.num_problems, each.accuracy) for each in exchange.evaluations] == reported
    assert all(each.majority_baseline == num_scored // 2 / num_scored for each in exchange.evaluations)
    rights = tuple(-1 if number >= num_scored else int(number < 30) for number in range(NUM_PROBLEMS))
    assert all((each.num_right, each.rewards, len(each.problems)) == (rights, (), 16) for each in exchange.evaluations)
    assert all((each.num_tries, each.num_right) == (1, 1) for each in shown)
    assert [(each.task_id, each.actions) for each in shown] == [(n, ("7",)) for n in range(min(num_scored, NUM_SHOWN))]
    assert len(learner.taken_in) == taken_in, "by less than half of the problems the guard decides nothing"


@pytest.mark.parametrize(
    ("rewards", "reward", "is_success"),
    [
        ({"outcome": 1.0, "found": 0.2}, 0.6, True),  # of a configuration that weighs both
        ({"outcome": 0.5, "found": 1.0}, 1.0, False),
        ({"found": 1.0}, 1.0, True),  # there is no outcome
        ({}, 0.0, False),  # a limit ended it
    ],
)
def test_success_is_the_outcome_whatever_is_weighed(rewards: dict[str, float], reward: float, is_success: bool) -> None:
    outcome = EpisodeOutcome(reward=reward, transitions=(Transition(is_end=True, rewards=rewards),))
    assert outcome.is_success == is_success
