"""The sharing benchmark counts what it says: draws, tokens, zero-variance groups, pairs of seeds, runs already made."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks._runs import Runs
from benchmarks._sharing_run import ARMS, MODES, Job, Outcome, Setting, Swarm, own_tasks, run
from benchmarks._sharing_start import specialist_weights, warm_weights
from benchmarks._statistics import Estimate, estimate
from benchmarks._trained_policy import GROUP_SIZE
from benchmarks.sharing import QUICK, goal, jobs, main, markdown, rows, runs_of
from swarm.model.version_digest import PublishedTensors
from swarm.types import Draw

MICRO = Setting(num_rounds=1, evaluate_every=1, num_problems=2, num_warm=1)


@pytest.fixture(scope="module")
def specialists(tmp_path_factory: pytest.TempPathFactory) -> list[PublishedTensors]:
    """One for each of four nodes, after a step only: they learn the way, not the skill."""
    folder = tmp_path_factory.mktemp("specialists")
    return [specialist_weights(0, node, own_tasks(node, 4), folder, num_steps=1) for node in range(4)]


def _swarm(mode: str, arm: str, seed: int, folder: Path, specialists: list[PublishedTensors]) -> Swarm:
    weights = specialists if mode == "spec" else [warm_weights(0)] * 4
    return Swarm(Job(setting=MICRO, mode=mode, arm=arm, seed=seed), weights, folder)


def _tokens_to_train(draw: Draw, external: str) -> int:
    total = 0
    for drawn in draw.groups:
        rewards = drawn.scored.rewards
        for rollout, reward in zip(drawn.scored.group.rollouts, rewards, strict=True):
            is_dropped = external == "positive" and not drawn.scored.is_made_here and reward < rewards.mean()
            assert rollout.trace is not None
            total += 0 if is_dropped else len(rollout.trace.token_ids)
    return total


@pytest.mark.parametrize(("arm", "mode"), list(zip(ARMS, itertools.cycle(MODES), strict=False)))
async def test_a_round_draws_and_counts_as_its_arm_says(
    mode: str, arm: str, tmp_path: Path, specialists: list[PublishedTensors]
) -> None:
    for seed in range(20):  # up to one whose first round teaches something: four groups may all be of zero variance
        swarm = _swarm(mode, arm, seed, tmp_path, specialists)
        draws = await swarm.play(1)
        signal = [node.counts["num_generated"] - node.counts["num_zero_variance"] for node in swarm.nodes]
        if sum(signal) > 0:
            break
    else:
        pytest.fail("no seed of 20 gives a first round with signal")
    wanted = ARMS[arm]
    for node, draw in zip(swarm.nodes, draws, strict=True):
        counts = node.counts
        local = [drawn.scored for drawn in draw.groups if drawn.scored.is_made_here]
        external = [drawn.scored for drawn in draw.groups if not drawn.scored.is_made_here]
        assert all(group.group.producer == node.name for group in local)
        assert all(group.group.producer != node.name for group in external)
        assert all(group.has_signal for group in (*local, *external))
        assert len({group.digest for group in (*local, *external)}) == len(draw.groups)
        assert len(local) == counts["num_local"] == min(wanted.num_local, signal[node.number])
        assert len(external) == counts["num_external"] == min(wanted.num_external, sum(signal) - signal[node.number])
        assert counts["num_generated"] == wanted.num_generated
        assert counts["num_zero_variance"] == draw.num_zero_variance
        assert counts["trained_tokens"] == _tokens_to_train(draw, wanted.external)
        assert node.policy.learner.version.step == (1 if draw.groups else 0) == 1 - counts["num_skipped"]
        assert node.policy.generator.version == node.policy.learner.version
        if mode == "heteroq":
            assert {group.group.env for group in local} <= set(own_tasks(node.number, 4))


async def test_arms_of_one_seed_start_with_the_same_questions_and_answers(tmp_path: Path) -> None:
    texts: dict[str, list[tuple[str, int, str]]] = {}
    for arm in ("4/0", "2/2"):
        swarm = _swarm("homo", arm, 0, tmp_path, [])
        made = await swarm.generate(swarm.nodes[0], 1)
        assert swarm.nodes[0].counts["generated_tokens"] == sum(group.group.num_tokens for group in made)
        texts[arm] = [(g.group.env, g.group.task_id, r.text) for g in made for r in g.group.rollouts]
    assert texts["2/2"] == texts["4/0"][: 2 * GROUP_SIZE]


def test_tasks_are_dealt_without_overlap_and_without_rest() -> None:
    dealt = [kind for node in range(4) for kind in own_tasks(node, 4)]
    assert len(dealt) == len(set(dealt)) == 8


def test_specialists_differ_by_node_and_are_built_once(tmp_path: Path) -> None:
    first = specialist_weights(0, 0, own_tasks(0, 4), tmp_path, num_steps=1)
    other = specialist_weights(0, 1, own_tasks(1, 4), tmp_path, num_steps=1)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = specialist_weights(0, 0, own_tasks(0, 4), tmp_path, num_steps=1)
    assert len(stamps) == 2 and stamps == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


def test_a_run_is_reproducible_and_survives_its_file(tmp_path: Path) -> None:
    job = Job(setting=MICRO, mode="homo", arm="2/2", seed=3)
    first, second = run(job), run(job)
    assert replace(first, seconds=0) == replace(second, seconds=0)
    assert first.rounds == (0, 1) and first.tokens_at == (0, first.generated_tokens)
    assert first.num_generated == 8 and first.trained_tokens > 0
    assert first.final == pytest.approx(np.mean(list(first.final_by_task.values())))
    runs = _runs(tmp_path / "runs" / "sharing.jsonl")
    runs.append(first)
    with runs.path.open("a") as file:
        file.write(json.dumps({"job": "cut"})[:8])  # as a kill leaves it
    runs.append(second)
    assert runs.read() == [first, second]


def _runs(path: Path) -> Runs[Outcome]:
    return runs_of([], path, 1)


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text('{"mode": "homo"}\n')
    with pytest.raises(ValueError, match=r"old\.jsonl:1: not a run of this version"):
        _runs(path).read()


def test_finished_runs_are_not_made_again(tmp_path: Path) -> None:
    wanted = jobs(MICRO, 1, ["homo"], ["4/0", "2/2"])
    runs = runs_of(wanted, tmp_path / "sharing.jsonl", 1)
    for job in wanted:
        runs.append(_outcome(job.arm, 0, [0.1, 0.2], job=job))
    before = runs.path.read_bytes()
    runs.make(wanted, Console(file=io.StringIO()))
    assert runs.path.read_bytes() == before


def _outcome(arm: str, seed: int, accuracy: list[float], mode: str = "homo", job: Job | None = None) -> Outcome:
    return Outcome(
        job=job or Job(setting=QUICK, mode=mode, arm=arm, seed=seed),
        rounds=tuple(range(len(accuracy))),
        accuracy=tuple(accuracy),
        tokens_at=tuple(100 * i for i in range(len(accuracy))),
        final_by_task={"max": accuracy[-1]},
        cumulative_reward=1.0,
        generated_tokens=1000,
        trained_tokens=500,
        num_generated=4,
        num_local=2,
        num_external=0,
        num_zero_variance=2,
        num_skipped=0,
        seconds=1.0,
    )


def test_intervals_are_students_t() -> None:
    # By hand: mean 2, s = 1, n = 3, t(.975, 2) = 4.303, 4.303 / sqrt(3) = 2.484.
    three = estimate([1.0, 2.0, 3.0])
    assert (three.mean, three.n) == (2.0, 3) and three.half_width == pytest.approx(2.484, abs=1e-3)
    assert estimate([0.5]) == Estimate(mean=0.5, half_width=None, n=1)


def test_gains_are_paired_by_seed_and_skip_seeds_without_a_partner() -> None:
    runs = [_outcome("4/0", 0, [0.0, 0.2]), _outcome("4/0", 1, [0.0, 0.6])]
    runs += [_outcome("2/2", 0, [0.0, 0.4]), _outcome("2/2", 1, [0.0, 0.81]), _outcome("2/2", 2, [0.0, 0.0])]
    baseline, shared = rows(runs)
    assert baseline.auc_gain is None and len(shared.runs) == 3
    assert shared.auc_gain is not None and shared.final_gain is not None
    assert shared.auc_gain.n == 2 and shared.auc_gain.mean == pytest.approx(0.1025)
    assert shared.final_gain.mean == pytest.approx(0.205)
    # The pairs differ by .2 and .21: the luck of a seed, three times as large, is not in the interval.
    assert shared.final_gain.is_nonzero and shared.final_gain.half_width == pytest.approx(12.706 * 0.005, abs=1e-3)
    assert "**+0.205 ± 0.064**" in markdown([baseline, shared])


def test_each_arm_is_also_held_against_the_filter_alone() -> None:
    runs = [_outcome("4/0", 0, [0.1]), _outcome("2/2", 0, [0.4]), _outcome("4/0 of 12", 0, [0.5])]
    baseline, shared, filtered = rows(runs)
    assert shared.auc_over_filter is not None and shared.auc_over_filter.mean == pytest.approx(-0.1)
    assert baseline.auc_over_filter is None and filtered.auc_over_filter is None
    assert filtered.auc_gain is not None and filtered.auc_gain.mean == pytest.approx(0.4)


def test_a_row_is_never_compared_with_another_mode() -> None:
    heteroq, homo = rows([_outcome("4/0", 0, [0.1], mode="homo"), _outcome("2/2", 0, [0.9], mode="heteroq")])
    assert heteroq.auc_gain is None and homo.auc_gain is None


def test_the_goal_is_the_first_evaluation_at_half_and_never_when_most_runs_miss_it() -> None:
    reached, missed = _outcome("4/0", 0, [0.4, 0.5, 0.4, 0.6]), _outcome("4/0", 1, [0.4, 0.4, 0.4, 0.49])
    assert goal(reached) == (1, 100) and goal(missed) is None
    (row,) = rows([reached, missed])
    assert (row.rounds_to_goal, row.tokens_to_goal, row.num_reached) == (None, None, 1)
    assert "never (1 of 2)" in markdown([row])


def test_the_table_leaves_out_runs_of_another_setting_and_seeds_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sharing.jsonl"
    options = ["--quick", "--table", "--seeds", "1", "--out", str(path)]
    with pytest.raises(SystemExit, match="1"):
        main(options)
    assert "holds no run" in capsys.readouterr().err
    full = Job(setting=Setting(), mode="homo", arm="4/0", seed=0)
    for outcome in (_outcome("4/0", 0, [0.1]), _outcome("4/0", 1, [0.3]), _outcome("4/0", 0, [0.9], job=full)):
        _runs(path).append(outcome)
    main(options)
    shown = capsys.readouterr().out
    assert "30 rounds, seeds 0 on 1 warm start(s), 1 runs" in shown and "| homo | 4/0 | 1 | 0.100 |" in shown
