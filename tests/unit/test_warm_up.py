"""The supervised warm-up: what it shows, when it ends, and that nobody makes it twice."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from workers import PlainLearner, QuietExchange, make_worker

from swarm.config import EnvironmentConfig, LearnerConfig, NodeConfig, parse_config
from swarm.environments.given_answers import GivenAnswers
from swarm.environments.load import build_environments
from swarm.episode import Actions, EpisodeOutcome, Transition
from swarm.errors import ConfigError
from swarm.interfaces import Verdict
from swarm.learn.learner import PolicyLearner
from swarm.loops.warm_up import ANSWERS_PER_STEP, NUM_TRIED, warm_up
from swarm.loops.worker import WarmUp
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.testing.tiny_models import make_learner
from swarm.types import PolicyVersion, Task, WarmUpReport

WARM_UP = {"answers": "references", "num_steps": 20}
TASKS = [Task(env="sums", task_id=number, messages=()) for number in range(NUM_TRIED)]


class Agent(QuietExchange):
    """The agent's side: an answer is worth its number."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[WarmUpReport] = []

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        outcomes = tuple(
            EpisodeOutcome(reward=float(each[0]), transitions=(Transition(is_end=True),)) for each in episodes
        )
        return Verdict(task=TASKS[0], outcomes=outcomes, verifier="fake/1", reference="1")

    async def report_warm_up(self, report: WarmUpReport) -> None:
        self.reports.append(report)


class Pupil:
    """A model that answers the first `per_update` more questions sometimes right after each update."""

    def __init__(self, per_update: int, knows: int = 0, *, is_sure: bool = False) -> None:
        self.knows, self.per_update, self.second = knows, per_update, "1" if is_sure else "0"
        self.shown: list[str] = []
        self.calls: list[str] = []
        self.notes: dict[str, Any] = {}

    def tries(self, tasks: Sequence[Task]) -> list[list[Actions]]:
        return [[("1",), (self.second,)] if task.task_id < self.knows else [("0",), ("0",)] for task in tasks]

    def imitate(self, pairs: Sequence[tuple[Task, str]], learning_rate: float, activity: str) -> float:
        assert learning_rate == 1e-4 and activity.startswith("warming up (")
        self.shown += [answer for _, answer in pairs]
        self.knows += self.per_update
        return 4.0 / len(self.shown)

    async def save(self) -> None:
        self.calls.append("save")

    def part(self, answer: str = "1", num_updates: int = 20) -> WarmUp:
        return WarmUp(
            pairs=lambda first, count: [
                (TASKS[0], answer if number % 2 else "0") for number in range(first, first + count)
            ],
            are_scored=True,
            tasks=TASKS,
            tries=self.tries,
            imitate=self.imitate,
            begin_anew=lambda: self.calls.append("begin"),
            notes=self.notes,
        )


def worker_of(tmp_path: Path, pupil: Pupil, **changes: Any) -> Any:
    config = parse_config(NodeConfig, {"dir": str(tmp_path), "warm_up": WARM_UP}, "t")
    return make_worker(config, Agent(), PlainLearner(), warm_up=pupil.part(**changes))


async def test_it_ends_as_soon_as_half_of_the_tried_groups_have_signal_and_shows_right_answers_alone(
    tmp_path: Path,
) -> None:
    pupil = Pupil(per_update=1)
    worker = worker_of(tmp_path, pupil)
    await warm_up(worker, worker.learner, pupil.save)
    (report,) = worker.exchange.reports
    assert (report.num_steps, report.signal_before, report.signal_after) == (9, 0, 9)
    assert set(pupil.shown) == {"1"} and len(pupil.shown) == report.num_steps * ANSWERS_PER_STEP // 2
    assert pupil.calls == ["begin", "save"]


async def test_it_ends_where_nearly_every_answer_is_right_though_no_rewards_differ(tmp_path: Path) -> None:
    pupil = Pupil(per_update=NUM_TRIED, is_sure=True)
    worker = worker_of(tmp_path, pupil)
    await warm_up(worker, worker.learner, pupil.save)
    assert worker.exchange.reports[0].num_steps == 1


async def test_it_is_bounded_and_not_made_twice(tmp_path: Path) -> None:
    pupil = Pupil(per_update=0)
    worker = worker_of(tmp_path, pupil)
    await warm_up(worker, worker.learner, pupil.save)
    await warm_up(worker, worker.learner, pupil.save)  # after a start at the checkpoint of step 0
    first, again = worker.exchange.reports
    assert first == again and first.num_steps == 20 and pupil.calls == ["begin", "save"]
    worker.learner.version = PolicyVersion(policy_id="own", step=1)
    pupil.notes.clear()
    await warm_up(worker, worker.learner, pupil.save)
    assert len(worker.exchange.reports) == 2, "steps were made"


async def test_a_model_whose_answers_teach_is_left_alone(tmp_path: Path) -> None:
    pupil = Pupil(per_update=1, knows=NUM_TRIED // 2)
    worker = worker_of(tmp_path, pupil)
    await warm_up(worker, worker.learner, pupil.save)
    assert worker.exchange.reports[0].num_steps == 0 and pupil.calls == [] and pupil.shown == []


async def test_answers_that_earn_nothing_are_not_imitated(tmp_path: Path) -> None:
    pupil = Pupil(per_update=1)
    worker = worker_of(tmp_path, pupil, answer="0")
    with pytest.raises(ConfigError, match=r"warm_up.answers = 'references': of the first 16 .*worth 0.*--warm-up FILE"):
        await warm_up(worker, worker.learner, pupil.save)
    assert pupil.shown == [] and pupil.notes == {}


def test_no_held_out_question_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"q{n}", "answer": "a" * (n % 9) if n % 10 else "W"}) + "\n" for n in range(400)
        )
    )
    data: dict[str, Any] = {"environments": [{"name": "own", "kind": "jsonl", "dataset": str(path)}]}
    for answers in ("references", str(path)):
        own = {**data, "warm_up": {"answers": answers}, "generator": {"max_new_tokens": 8}}
        config = parse_config(NodeConfig, own, "t")
        environments = build_environments(config.environments)
        other = environments["own"].task(next(n for n in range(400) if not environments["own"].task(n).is_held_out))
        given = GivenAnswers(config, environments, held_out=[other], tokenizer=CharTokenizer())
        pairs = given.pairs(0, 500)
        assert len({task.task_id for task, _ in pairs}) > 100
        assert {answer for _, answer in pairs} == {"a" * size for size in range(1, 8)}, "no W, and 8 tokens with an end"
        assert not any(task.is_held_out or task.messages == other.messages for task, _ in pairs)


def test_a_node_that_does_not_train_is_not_warmed_up() -> None:
    with pytest.raises(ConfigError, match=r"warm_up.answers: needs the trainer role"):
        parse_config(NodeConfig, {"roles": ["generator"], "warm_up": {"answers": "references"}}, "t")


def test_an_update_is_the_mean_likelihood_of_the_answers_and_makes_version_0(tmp_path: Path) -> None:
    def learner() -> PolicyLearner:
        return make_learner(tmp_path, config=LearnerConfig(max_grad_norm=1e9))

    warmed, tokenizer = learner(), CharTokenizer()
    config = EnvironmentConfig(name="sort", kind="char", dataset="sort")
    environment = build_environments([config])["sort"]
    pairs = [(environment.task(number), environment.reference(number)) for number in range(5)]
    network, losses = tiny_network(seed=1), list[torch.Tensor]()
    for task, answer in pairs:  # the loss by itself: no batch, no packing
        prompt, ids = tokenizer.encode_prompt(task), tokenizer.encode_response(answer)
        logits = cast(Any, network)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        losses.append(functional.cross_entropy(logits, torch.tensor(ids), reduction="none"))
    expected = torch.cat(losses).mean()
    before = warmed.version
    assert warmed.imitate(pairs, 1e-3) == pytest.approx(expected.item(), rel=1e-5)
    for _ in range(5):
        warmed.imitate(pairs, 1e-3)
    assert warmed.imitate(pairs, 1e-3) < 0.8 * expected.item() and warmed.version == before
    warmed.begin_anew()
    assert warmed.version.step == 0 and warmed.version.digest != before.digest
    warmed.notes["warm_up"] = {"num_steps": 6}
    warmed.save()
    resumed = learner()
    assert resumed.version == warmed.version and resumed.notes["warm_up"] == {"num_steps": 6}
