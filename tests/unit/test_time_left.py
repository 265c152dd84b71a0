"""Time left of a run: by its first evaluation before the first step, then by its newest steps."""

import pytest

from swarm.config import EnvironmentConfig, EvaluationConfig, GeneratorConfig, LearnerConfig, NodeConfig, ReplayConfig
from swarm.events import PolicyEvaluated, StepMade, VersionPublished
from swarm.telemetry.time_left import TimeLeft, duration_words

NUM_STEPS, EVERY, EVALUATION_S = 30, 10, 50.0


def config_of(num_steps: int = NUM_STEPS) -> NodeConfig:
    return NodeConfig(
        run_id="r",
        environments=(EnvironmentConfig(name="sums", kind="char", dataset="copy"),),
        learner=LearnerConfig(num_steps=num_steps),
        evaluation=EvaluationConfig(every_steps=EVERY, num_problems=64),
        replay=ReplayConfig(local_groups=4, external_groups=4),
        generator=GeneratorConfig(group_size=8, env_weights={"sums": 1.0}),
    )


class Run:
    """A run on a machine whose speed the test sets; its answers take as long in a step as in an evaluation."""

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        self.now_s, self.step = 1_000.0, 0
        self.left = TimeLeft(config=config_of(num_steps))
        self.left.see(VersionPublished(at_s=self.now_s, policy_id="a", step=0, digest="d"))

    def evaluate(self, seconds: float = EVALUATION_S) -> None:
        self.now_s += seconds
        for split in ("held_out", "all"):
            self.left.see(
                PolicyEvaluated(
                    at_s=self.now_s,
                    step=self.step,
                    env="sums",
                    split=split,
                    accuracy=0.5,
                    num_problems=64,
                    majority_baseline=0.1,
                )
            )

    def make_step(self, seconds: float) -> None:
        self.now_s, self.step = self.now_s + seconds, self.step + 1
        self.left.see(
            StepMade(
                at_s=self.now_s, step=self.step, draw_step=self.step, digest="d", loss=0.0, grad_norm=1.0, num_tokens=1
            )
        )
        if self.step % EVERY == 0:
            self.evaluate()

    @property
    def left_s(self) -> float:
        left_s = self.left.seconds(self.now_s)
        assert left_s is not None
        return left_s


def test_nothing_is_said_before_anything_was_measured_nor_of_a_run_without_an_end() -> None:
    run, endless = Run(), Run(num_steps=0)
    assert run.left.seconds(run.now_s + 5) is None
    endless.evaluate()
    endless.make_step(9.0)
    assert endless.left.seconds(endless.now_s) is None


def test_before_the_first_step_the_first_evaluation_tells_within_a_factor_of_two() -> None:
    run = Run()
    run.evaluate()
    step_s = EVALUATION_S * 64 / 128  # a step learns from 64 responses, an evaluation asked for 128
    assert run.left_s == pytest.approx(NUM_STEPS * step_s + 3 * EVALUATION_S, rel=0.15)


def test_at_a_third_the_own_pace_tells_within_a_quarter_though_steps_vary() -> None:
    run = Run()
    run.evaluate()
    for number in range(NUM_STEPS // 3):
        run.make_step(4.0 if number % 2 else 8.0)
    assert run.left_s == pytest.approx(20 * 6.0 + 2 * EVALUATION_S, rel=0.25)


def test_a_machine_that_becomes_busy_shows_within_the_newest_steps() -> None:
    run = Run()
    run.evaluate()
    for _ in range(9):
        run.make_step(5.0)
    for _ in range(8):
        run.make_step(15.0)
    assert run.left_s == pytest.approx(13 * 15.0 + 2 * EVALUATION_S, rel=0.1)


def test_the_time_left_shrinks_while_a_step_is_made_and_waits_where_that_takes_longer() -> None:
    run = Run()
    run.evaluate()
    run.make_step(5.0)
    before, half, late = (run.left.seconds(run.now_s + s) for s in (0.0, 2.5, 60.0))
    assert before is not None and half == before - 2.5 and late == before - 5.0


def test_the_end_is_zero_seconds_away_once_the_last_evaluation_is_made() -> None:
    run = Run()
    run.evaluate()
    for _ in range(NUM_STEPS):
        run.make_step(5.0)
    assert run.left_s == 0.0


def test_durations_are_rounded_to_what_can_be_known() -> None:
    assert [duration_words(s) for s in (0.0, 44.0, 100.0, 3_000.0, 9_000.0)] == [
        "10 s", "40 s", "2 min", "50 min", "2 h 30 min",
    ]  # fmt: skip
