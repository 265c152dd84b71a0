"""Rounds of chosen questions: repeatable, exact in number, and again until it is enough."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.environments.curriculum import AdaptiveCurriculum
from swarm.episode import Actions, Message
from swarm.errors import ConfigError, RolloutFailed
from swarm.interfaces import PromptChooser, Verdict
from swarm.objectives.methods.fg_expo import GaussianAccuracy
from swarm.objectives.methods.reinforce_ada import SuccessiveElimination
from swarm.objectives.methods.rollout_gdro import RobustCounts
from swarm.testing.builders import answer_outcome
from swarm.testing.nodes import inline
from swarm.types import FinishReason, Rollout, RolloutGroup, Sampling, Task

NUM_TASKS = 10


def task(number: int) -> Task:
    return Task(env="sums", task_id=number, messages=(Message(role="user", content=str(number)),))


def candidates(first: int, count: int) -> list[Task]:
    return [task(number % NUM_TASKS) for number in range(first, first + count)]


class Model:
    """Answers right as often as task_id / 10, by the number of the question alone."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []  # task, responses, number

    def answer(self, tasks: Sequence[Task], size: int, numbers: Sequence[int]) -> list[RolloutGroup]:
        self.asked += [(each.task_id, size, number) for each, number in zip(tasks, numbers, strict=True)]
        return [self._group(each, size, number) for each, number in zip(tasks, numbers, strict=True)]

    def _group(self, asked: Task, size: int, number: int) -> RolloutGroup:
        rng = np.random.default_rng(number)
        texts = ["1" if rng.random() < asked.task_id / NUM_TASKS else "0" for _ in range(size)]
        rollouts = [
            Rollout(
                actions=(text,), trace=None, sampling=Sampling(), finish=FinishReason.STOP, claimed_reward=float("nan")
            )
            for text in texts
        ]
        return RolloutGroup(
            run_id="run",
            producer="me",
            policy_id="me",
            env=asked.env,
            task_id=asked.task_id,
            tokenizer_digest=b"",
            prompt_ids=np.zeros(1, np.int32),
            rollouts=tuple(rollouts),
            verifier="",
            created_at_s=0.0,
        )

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        outcomes = tuple(answer_outcome(float(text)) for *_, text in episodes)
        return Verdict(task=task(task_id), outcomes=outcomes, verifier="", reference="")


def chosen(
    chooser: PromptChooser, model: Model, path: Path, group_size: int = 4, largest: int = 16
) -> AdaptiveCurriculum:
    return AdaptiveCurriculum(
        chooser=chooser,
        candidates=candidates,
        answer=model.answer,
        verify=model.verify,
        offload=inline,
        path=path / "questions.json",
        seed=3,
        group_size=group_size,
        largest=largest,
    )


def outline(groups: Sequence[RolloutGroup]) -> list[tuple[int, str]]:
    return [(group.task_id, "".join(rollout.text for rollout in group.rollouts)) for group in groups]


async def test_questions_around_half_accuracy_are_asked_most(tmp_path: Path) -> None:
    questions = chosen(GaussianAccuracy(width=0.1, pace=0.3), Model(), tmp_path)
    asked: list[int] = []
    for first in range(0, 800, 4):
        asked += [group.task_id for group in await questions.ask(first, 4)]
    late = asked[400:]
    assert sum(3 <= number <= 7 for number in late) > 0.75 * len(late)


async def test_no_question_comes_twice_in_a_round(tmp_path: Path) -> None:
    questions = chosen(GaussianAccuracy(), Model(), tmp_path)
    for first in range(0, 80, 8):
        asked = [group.task_id for group in await questions.ask(first, 8)]
        assert len(set(asked)) == 8


async def test_more_questions_than_tasks_are_asked_all_the_same(tmp_path: Path) -> None:
    assert len(await chosen(GaussianAccuracy(), Model(), tmp_path).ask(0, 2 * NUM_TASKS)) == 2 * NUM_TASKS


@pytest.mark.parametrize("chooser", [GaussianAccuracy(pace=0.5), RobustCounts(k=1, pace=0.5), SuccessiveElimination()])
async def test_a_kill_in_any_round_changes_nothing(chooser: PromptChooser, tmp_path: Path) -> None:
    """Each round is made twice, the second time by a new process that has only the file."""
    whole = chosen(chooser, Model(), tmp_path / "whole")
    expected = [outline(await whole.ask(first, 4)) for first in range(0, 40, 4)]
    for first, round_of in zip(range(0, 40, 4), expected, strict=True):
        assert outline(await chosen(chooser, Model(), tmp_path / "killed").ask(first, 4)) == round_of
        assert outline(await chosen(chooser, Model(), tmp_path / "killed").ask(first, 4)) == round_of


async def test_a_prompt_is_asked_again_with_new_samples_until_its_answers_are_mixed(tmp_path: Path) -> None:
    model = Model()
    groups = await chosen(SuccessiveElimination(rounds=4, keep=4), model, tmp_path).ask(0, 10)
    for group in groups:
        texts = [rollout.text for rollout in group.rollouts]
        is_mixed = texts.count("1") >= 2 and texts.count("0") >= 2
        assert is_mixed or len(texts) == 16
        before = texts[:-4]
        assert before.count("1") < 2 or before.count("0") < 2, "one round was too many"
        assert len({number for asked, _, number in model.asked if asked == group.task_id}) == len(texts) // 4


async def test_a_largest_group_is_never_exceeded(tmp_path: Path) -> None:
    groups = await chosen(SuccessiveElimination(), Model(), tmp_path, group_size=4, largest=6).ask(0, 10)
    assert max(len(group.rollouts) for group in groups) == 6


async def test_counts_keep_the_mean(tmp_path: Path) -> None:
    questions = chosen(RobustCounts(k=1, pace=0.5, least=2), Model(), tmp_path)
    sizes: dict[int, list[int]] = {}
    for first in range(0, 200, 5):
        for group in await questions.ask(first, 5):
            sizes.setdefault(group.task_id, []).append(len(group.rollouts))
    assert sum(map(sum, sizes.values())) == pytest.approx(200 * 4, abs=16)
    late = {number: sum(found[len(found) // 2 :]) / len(found[len(found) // 2 :]) for number, found in sizes.items()}
    assert late[0] < 3 < 4.5 < late[5], late


async def test_what_cannot_be_scored_is_handed_on_and_teaches_nothing(tmp_path: Path) -> None:
    class Broken(Model):
        async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
            raise RolloutFailed("out of time")

    groups = await chosen(GaussianAccuracy(), Broken(), tmp_path).ask(0, 4)
    assert [len(group.rollouts) for group in groups] == [4] * 4
    assert json.loads((tmp_path / "questions.json").read_text())["states"][1]["memory"] == {"accuracy": {}}


async def test_skipped_numbers_go_on_with_what_is_known(tmp_path: Path) -> None:
    await chosen(GaussianAccuracy(), Model(), tmp_path).ask(0, 4)
    await chosen(GaussianAccuracy(), Model(), tmp_path).ask(10, 4)
    states = json.loads((tmp_path / "questions.json").read_text())["states"]
    assert [state["number"] for state in states] == [10, 14]
    assert len(states[0]["memory"]["accuracy"]) == 4


async def test_other_constants_start_anew_and_a_broken_file_is_named(tmp_path: Path) -> None:
    await chosen(GaussianAccuracy(), Model(), tmp_path).ask(0, 4)
    await chosen(GaussianAccuracy(width=0.2), Model(), tmp_path).ask(4, 4)
    states = json.loads((tmp_path / "questions.json").read_text())["states"]
    assert states[0]["memory"] == {"accuracy": {}}
    (tmp_path / "questions.json").write_text("{")
    with pytest.raises(ConfigError, match=r"questions.json: .*delete it"):
        chosen(GaussianAccuracy(), Model(), tmp_path)


async def test_odds_of_zero_for_all_leave_any(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Nothing:
        def initial(self) -> Mapping[str, Any]:
            return {}

        def odds(self, memory: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
            return [0.0] * len(keys)

        def counts(self, memory: Mapping[str, Any], keys: Sequence[str], group_size: int, largest: int) -> list[int]:
            return [group_size] * len(keys)

        def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
            return 0

        def seen(self, memory: Mapping[str, Any], key: str, rewards: Sequence[float]) -> Mapping[str, Any]:
            return memory

    assert len(await chosen(Nothing(), Model(), tmp_path).ask(0, 3)) == 3


def test_the_loop_is_left_free_while_answers_are_made(tmp_path: Path) -> None:
    async def run() -> int:
        questions = chosen(GaussianAccuracy(), Model(), tmp_path)
        questions._offload = asyncio.to_thread  # pyright: ignore[reportAttributeAccessIssue]
        return len(await questions.ask(0, 2))

    assert asyncio.run(run()) == 2
