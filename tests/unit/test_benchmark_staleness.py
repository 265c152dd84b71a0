"""The staleness benchmark: batches have the age that the job says, and tables compare like with like."""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks._runs import decode
from benchmarks._staleness_run import METHODS, Job, Outcome, Setting, StaleRun, run
from benchmarks.staleness import QUICK, cells, jobs, markdown, plot, quick_jobs

SHORT = Setting(num_updates=8, evaluate_every=4, num_problems=2, num_warm=1)
JOB = Job(setting=SHORT, method="PPO-clip", schedule="one", source="own", age=3, learning_rate=3e-4, seed=0)


@pytest.mark.parametrize(("schedule", "age"), [("one", 3), ("four", 4)])
def test_every_batch_is_as_old_as_the_job_says_once_there_is_data_of_that_age(
    tmp_path: Path, schedule: str, age: int
) -> None:
    stale = StaleRun(replace(JOB, schedule=schedule, age=age), tmp_path)
    num_batches = 4

    async def play() -> list[int]:
        reports = [await stale.advance(number) for number in range(1, num_batches + 1)]
        return [max(report.ages_steps) for report in reports if report is not None]

    ages = asyncio.run(play())
    per_batch = stale.job.updates_per_batch
    assert set(ages) <= {min(age, number * per_batch) for number in range(num_batches)}
    assert ages[-1] == age
    updates = stale.policy.policy.learner.version.step
    assert updates == len(ages), "one version for each batch, however many updates made it"


def test_half_of_the_groups_are_external_where_the_job_says_so(tmp_path: Path) -> None:
    stale = StaleRun(replace(JOB, source="external", age=0), tmp_path)
    report = asyncio.run(stale.advance(1))
    assert report is not None and report.num_external > 0 and report.num_local > 0
    assert stale.peer is not None and stale.peer.policy.learner.version.step <= 1


def test_the_guard_shortens_the_queue_and_counts_what_it_drops(tmp_path: Path) -> None:
    stale = StaleRun(replace(JOB, method="none + guard", age=3), tmp_path)

    async def play() -> None:
        for number in range(1, 5):
            await stale.advance(number)
        stale.policy.learner._state = replace(stale.policy.learner.state, max_age_steps=1)
        await stale.advance(5)

    asyncio.run(play())
    assert stale.num_dropped > 0 and len(stale.waiting) <= 2


def test_a_run_is_whole_and_survives_json() -> None:
    outcome = run(JOB)
    assert outcome.updates == (0, 4, 8) and len(outcome.accuracy) == len(outcome.ess_share) == 3
    assert decode(Outcome, json.loads(json.dumps(asdict(outcome)))) == outcome


def outcome(method: str, seed: int, accuracy: tuple[float, ...], **job: object) -> Outcome:
    return Outcome(
        job=replace(JOB, method=method, seed=seed, **job),  # type: ignore[arg-type]
        updates=tuple(range(0, 4 * len(accuracy), 4)),
        accuracy=accuracy,
        mismatch_kl=(0.0,) * len(accuracy),
        ess_share=(1.0,) * len(accuracy),
        clip_share=0.0,
        final_by_task={},
        generated_tokens=0,
        num_skipped=0,
        num_dropped=0,
        guard_level=0.0,
        max_age_steps=0,
        seconds=1.0,
    )


def test_a_collapse_is_a_fall_below_half_of_the_best_without_return() -> None:
    assert outcome("none", 0, (0.3, 0.6, 0.2, 0.1)).collapse == 8
    assert outcome("none", 0, (0.3, 0.6, 0.2, 0.5)).collapse is None
    assert outcome("none", 0, (0.3, 0.3, 0.3)).collapse is None


def test_differences_are_paired_by_seed_within_one_condition(tmp_path: Path) -> None:
    runs = [
        outcome(method, seed, (0.3, level + 0.1 * seed), age=age)
        for method, level in (("PPO-clip", 0.4), ("MinPRO", 0.5))
        for seed in range(3)
        for age in (0, 16)
    ]
    found = {(cell.method, cell.age): cell for cell in cells(runs)}
    gain = found["MinPRO", 16].gain
    assert gain is not None and gain.mean == pytest.approx(0.1) and gain.half_width == pytest.approx(0, abs=1e-9)
    assert found["PPO-clip", 16].gain is None
    assert "| MinPRO | 0.600" in markdown(cells(runs)) and "**+0.100" in markdown(cells(runs))
    plot(cells(runs), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_whole_plan_has_what_the_table_needs() -> None:
    wanted = jobs(3)
    assert len(set(wanted)) == len(wanted)
    for name in METHODS:
        ages = {job.age for job in wanted if job.method == name and job.schedule == "one" and job.source == "own"}
        assert ages == {0, 1, 4, 16, 64}
    assert {job.setting for job in quick_jobs(1)} == {QUICK}
