"""`swarm plan` against cases computed by hand, and the run that it reads."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_events import make
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.errors import ConfigError
from swarm.events import Event, GroupPut, GroupsDrawn, GroupUse, StepMade, VersionApplied, VersionPublished, to_json
from swarm.extras.plan.capacity_plan import (
    GeneratorFigures,
    LearnerFigures,
    fleet,
    groups_per_s,
    lag_steps,
    plan,
    stage_seconds,
)
from swarm.extras.plan.plan_run import read_run

# T = 2 s, b = 8 groups of 50 tokens: 4 groups/s. Generator: 100 tokens/s, so 2 groups/s; batches of 4 take 2 s.
LEARNER = LearnerFigures(step_s=2.0, groups_per_step=8, tokens_per_group=50, max_age_steps=4)
GENERATOR = GeneratorFigures(name="one", tokens_per_s=100.0, groups_per_batch=4)
# all stages: 2 + 4 * 1000 / 8000 + 0.25 + 10_000 / 20_000 + 1.25 = 4.5 s
LINES = replace(LEARNER, bytes_per_group=1000, patch_bytes=10_000, encode_s=0.25)
ON_LINES = replace(GENERATOR, apply_s=1.25, down_bytes_per_s=20_000, up_bytes_per_s=8_000)


def test_supply_covers_demand_with_the_fewest_generators() -> None:
    found = plan(LEARNER, GENERATOR)
    assert (found.groups_per_s, found.num_generators) == (2.0, 2)
    assert plan(replace(LEARNER, groups_per_step=8.1), GENERATOR).num_generators == 3
    assert plan(replace(LEARNER, groups_per_step=3.9), GENERATOR).num_generators == 1
    supply = found.inequalities[0]
    assert supply.holds and supply.numbers == "2 x 2 = 4 >= 8 / 2 = 4 groups/s"


def test_the_lag_is_all_stages_in_steps_rounded_up_and_one_in_the_queue() -> None:
    assert lag_steps(LEARNER, GENERATOR, 2) == 1 + 1
    assert sum(stage_seconds(LINES, ON_LINES).values()) == pytest.approx(4.5)
    found = plan(LINES, ON_LINES)
    assert (found.lag_steps, found.lag_mean_steps) == (3 + 1, 4.5 / 2 + 1)
    assert found.holds and not plan(replace(LINES, max_age_steps=3), ON_LINES).holds
    assert found.inequalities[1].numbers == "ceil((2 + 0.5 + 0.25 + 0.5 + 1.25) / 2) + 1 = 4 <= 4 steps"


def test_too_few_generators_make_groups_wait_for_each_other() -> None:
    assert lag_steps(LEARNER, GENERATOR, 1) == 1 + 2, "8 groups at 2 groups/s are 2 steps"
    assert lag_steps(LEARNER, replace(GENERATOR, tokens_per_s=0.0), 5) is None


def test_what_would_be_enough_is_just_enough() -> None:
    found = plan(LINES, ON_LINES)
    # (4 - 1) * 2 s - 2.5 s of the other stages = 3.5 s for 4 * 50 tokens
    assert found.least_tokens_per_s == pytest.approx(200 / 3.5)
    # min(T = 2 s, 6 s - 4 s) for 10_000 bytes
    assert found.least_down_bytes_per_s == pytest.approx(5000)
    tight = replace(LINES, max_age_steps=3)  # 4 s for all stages: 1.5 s for the tokens, none for the patch
    needed = plan(tight, ON_LINES)
    assert needed.least_tokens_per_s == pytest.approx(200 / 1.5) and needed.least_down_bytes_per_s is None
    assert plan(tight, replace(ON_LINES, tokens_per_s=200 / 1.5)).inequalities[1].holds
    assert plan(replace(LINES, max_age_steps=0), ON_LINES).least_tokens_per_s is None


def test_a_line_too_slow_for_every_version_fails_although_the_lag_is_kept() -> None:
    found = plan(replace(LINES, max_age_steps=9), replace(ON_LINES, down_bytes_per_s=4_000))
    supply, lag, bandwidth, credit = found.inequalities
    assert supply.holds and lag.holds and credit.holds and not bandwidth.holds
    assert bandwidth.numbers == "10 k / 2 = 5000 <= 4000 bytes/s"
    assert found.least_down_bytes_per_s == 5000


def test_standing_still_for_a_version_costs_its_share_of_each_step() -> None:
    paused = replace(GENERATOR, apply_s=1.0, pause_s=1.0)
    assert groups_per_s(LEARNER, paused) == 1.0 and plan(LEARNER, paused).num_generators == 4
    assert plan(LEARNER, replace(GENERATOR, pause_s=2.0)).num_generators is None


def test_batches_that_do_not_fit_into_the_credit_are_seen() -> None:
    small = replace(LEARNER, max_age_steps=2, groups_per_step=4)  # credit for 12 groups
    assert plan(small, replace(GENERATOR, groups_per_batch=12)).inequalities[3].holds
    assert not plan(small, replace(GENERATOR, groups_per_batch=13)).inequalities[3].holds


def test_different_generators_add_up() -> None:
    fast, slow = GENERATOR, replace(GENERATOR, tokens_per_s=50.0)
    assert fleet(LEARNER, [fast, slow, slow]).numbers == "2 + 1 + 1 = 4 >= 8 / 2 = 4"
    assert fleet(LEARNER, [fast, slow, slow]).holds and not fleet(LEARNER, [fast, slow]).holds
    assert not fleet(LEARNER, []).holds


# --- a run -------------------------------------------------------------------------------------------


TRAINER_ID = "ab" * 32


def write(directory: Path, name: str, events: list[Event], batch: int) -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "events.jsonl").write_text("".join(json.dumps(to_json(event)) + "\n" for event in events))
    settings = f"[generator]\ngroups_per_batch = {batch}\n[replay]\nmax_age_steps = 3\n"
    (directory / name / "node.toml").write_text(settings)


def put(at_s: float) -> GroupPut:
    return make(GroupPut, at_s=at_s, policy_id=TRAINER_ID, size_bytes=700, num_tokens=50)


def applied(num_bytes: int) -> VersionApplied:
    seconds = {"stage": 0.5, "load": 0.25, "pause": 0.1}
    return VersionApplied(at_s=1.0, policy_id=TRAINER_ID, step=1, digest="d", num_bytes=num_bytes, seconds=seconds)


def step_made(step: int, seconds: dict[str, float]) -> StepMade:
    return make(StepMade, at_s=step, step=step, draw_step=step, seconds=seconds)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A trainer, and a generator that makes 2 groups of 50 tokens in 4 s, and at first only each 8 s."""
    seconds = {"draw_wait": 9.0, "learn": 1.75, "publish": 0.25, "score": 1.0}
    groups = tuple(make(GroupUse, is_own_policy=is_own_policy) for is_own_policy in (True, True, False))
    trainer: list[Event] = [VersionPublished(policy_id=TRAINER_ID, step=0, digest="d")]
    for step in (1, 2, 3):
        draw = make(GroupsDrawn, draw_step=step, groups=groups, num_zero_variance=1)
        trainer += [draw, step_made(step, seconds)]
    made = [put(at_s + 0.01 * n) for at_s in [*range(0, 80, 8), *range(80, 120, 4)] for n in range(2)]
    write(tmp_path / "swarm", "ada", trainer, batch=4)
    write(tmp_path / "swarm", "bell", [applied(10**6), applied(1000), applied(3000), *made], batch=2)
    return tmp_path


def test_a_run_is_read_as_it_was_measured(run: Path) -> None:
    found = read_run(run)
    assert (found.trainer, found.step_s, found.encode_s, found.max_age_steps) == ("ada", 2.0, 0.25, 3)
    assert (found.groups_per_step, found.tokens_per_group, found.bytes_per_group) == (3, 50, 700)
    assert found.patch_bytes == 2000, "the first version is no patch"
    (bell,) = found.generators
    assert bell.name == "bell" and bell.groups_per_batch == 2
    assert bell.tokens_per_s == pytest.approx(25.0), "of its fastest fifth: in the others it waited for credit"
    assert (bell.apply_s, bell.pause_s) == (0.75, 0.1)
    assert math.isinf(bell.down_bytes_per_s), "a run on one machine says nothing of lines"


def shown(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return found.exit_code, found.output


def test_the_command_answers_from_a_run_and_an_option_beats_it(run: Path) -> None:
    code, output = shown("--run", str(run), "--json")
    answer = json.loads(output)
    # 3 groups in 2 s; bell: 0.5 groups/s less a pause of 0.1 s in 2 s
    assert answer["plans"][0]["groups_per_s"] == pytest.approx(0.475)
    assert answer["plans"][0]["num_generators"] == 4 and not answer["together"]["holds"]
    assert code == (0 if answer["plans"][0]["holds"] else 1)
    answer = json.loads(shown("--run", str(run), "--tokens-per-s", "1000", "--max-age", "5", "--json")[1])
    assert answer["plans"][0]["num_generators"] == 1 and answer["learner"]["max_age_steps"] == 5
    assert answer["plans"][0]["generator"]["apply_s"] == 0.75, "otherwise like the one that was measured"


def test_the_command_says_what_the_trainer_computed_in(run: Path) -> None:
    words = "float32 (measured: 31.0 GFLOP/s in float32, 3.1 in bfloat16)"
    (run / "swarm" / "ada" / "compute_dtype.txt").write_text(words)
    assert f"ada computed in {words}" in shown("--run", str(run))[1]
    assert words not in shown("--run", str(run), "--step-s", "1")[1], "another machine is asked about"


GIVEN = ("--step-s", "2", "--groups-per-step", "8", "--tokens-per-group", "50", "--max-age", "4")


def test_the_command_prints_each_inequality_with_its_numbers() -> None:
    code, output = shown(*GIVEN, "--tokens-per-s", "100", "--groups-per-batch", "4")
    assert code == 0 and "N r >= b / T" in output and "2 x 2 = 4 >= 8 / 2 = 4 groups/s" in output
    assert "<= max_age" in output and "patch_bytes / T <= b_down" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--step-s: missing"),
        (["--step-s", "0"], "--step-s: 0 must be above 0"),
        (["--step-s", "nan"], "--step-s"),
        ([*GIVEN[:-1], "-1"], "--max-age"),
        (GIVEN, "--tokens-per-s: missing"),
        ([*GIVEN, "--tokens-per-s", "0"], "--tokens-per-s: 0 must be above 0"),
        ([*GIVEN, "--tokens-per-s", "9", "--groups-per-batch", "0"], "--groups-per-batch"),
        (["--run", "nowhere"], "--run nowhere"),
    ],
)
def test_errors_name_the_option(arguments: list[str], named: str) -> None:
    code, output = shown(*arguments)
    assert code == 2 and named in output


def test_a_run_with_several_trainers_asks_which(run: Path) -> None:
    step = step_made(1, {"score": 1.0, "backward": 2.0, "optimizer": 1.0})
    write(run / "swarm", "curie", [step], batch=1)
    with pytest.raises(ConfigError, match="--trainer"):
        read_run(run)
    with pytest.raises(ConfigError, match="--trainer nobody"):
        read_run(run, "nobody")
    assert read_run(run, "curie").step_s == read_run(run / "swarm", "curie").step_s == 4.0


def test_the_memory_of_a_gpu_is_planned_from_a_node_toml(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[model]\nsource = "smollm2"\ndtype = "bfloat16"\n', encoding="utf-8")

    def planned(gib: float, *arguments: str) -> Any:
        command = ["plan", "--gpu", str(gib), "-c", str(path), *arguments]
        return CliRunner().invoke(app, command, env={"COLUMNS": "100"})

    whole = {each["name"]: each for each in json.loads(planned(24, "--json").stdout)}
    configured, every = whole["as configured"], whole["all of these"]
    # AdamW's masters and moments alone: 12 bytes of each of 134,515,008 parameters
    assert configured["uses"]["AdamW"] == 12 * 134_515_008 and configured["fits"]
    assert all(every["peak"] <= each["peak"] <= configured["peak"] for each in whole.values())
    between = (every["peak"] + configured["peak"]) / 2 / 2**30
    found = planned(between)
    assert found.exit_code == 0 and "as configured" in found.stdout and " no" in found.stdout and " yes" in found.stdout
    assert planned(0.1).exit_code == 1
    refused = planned(-1)
    assert refused.exit_code != 0
