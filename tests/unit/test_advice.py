"""The off-policy guard: medians, hysteresis, bounded weights, and a log of every change."""

import math

import pytest

from coordinator.advice import Guard, GuardLimits
from swarm.types import EdgeReport

SOURCE, OTHER = "5" * 64, "6" * 64


def edge(ess: float = 0.9, kl: float = 0.01, age: float = 2.0, source: str = SOURCE, groups: int = 4) -> EdgeReport:
    return EdgeReport(
        source=source, num_groups=groups, age_mean_steps=age, ess_share=ess, mismatch_kl=kl, reward_mean=0.5
    )


def test_without_reports_there_is_no_opinion() -> None:
    guard = Guard(base_max_age_steps=4)
    assert guard.decide(0.0) == []
    advice = guard.advice("a", lease_s=30.0)
    assert (advice.max_age_steps, advice.source_weights, advice.guard) == (None, {}, "ok")


def test_good_figures_leave_everything_as_it_is() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(),), 0.0)
    assert guard.decide(0.0) == [] and guard.guard == "ok"


def test_late_data_with_few_effective_samples_halves_the_lag_bound_step_by_step() -> None:
    guard, bounds = Guard(base_max_age_steps=8), []
    for now_s in (0.0, 10.0, 30.0, 60.0, 90.0):
        guard.report("a", (edge(ess=0.2),), now_s)
        guard.decide(now_s)
        bounds.append(guard.max_age_steps)
    assert bounds == [4, 4, 2, 1, 1]
    assert guard.guard == "tightened"


def test_the_bound_never_rises_above_or_is_advised_above_its_base() -> None:
    guard = Guard(base_max_age_steps=0)
    guard.report("a", (edge(ess=0.2),), 0.0)
    guard.decide(0.0)
    assert guard.max_age_steps == 0


def test_between_tight_and_loose_nothing_changes() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(ess=0.2),), 0.0)
    guard.decide(0.0)
    guard.report("a", (edge(ess=0.4),), 40.0)
    assert [change.what for change in guard.decide(40.0)] == ["weight"]
    assert guard.max_age_steps == 2


def test_good_figures_give_one_step_back_at_a_time_until_there_is_no_opinion() -> None:
    guard, bounds = Guard(base_max_age_steps=4), []
    guard.report("a", (edge(ess=0.2),), 0.0)
    guard.decide(0.0)
    for now_s in (31.0, 62.0, 93.0):
        guard.report("a", (edge(ess=0.9),), now_s)
        guard.decide(now_s)
        bounds.append((guard.max_age_steps, guard.guard))
    assert bounds == [(3, "tightened"), (None, "ok"), (None, "ok")]


def test_the_bound_is_released_when_nobody_reports_late_data_any_more() -> None:
    guard = Guard(base_max_age_steps=2)
    guard.report("a", (edge(ess=0.2),), 0.0)
    guard.decide(0.0)
    assert guard.max_age_steps == 1
    guard.decide(200.0)
    assert guard.max_age_steps is None and guard.source_weights == {}


def test_hopeless_figures_freeze() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(ess=0.01),), 0.0)
    guard.decide(0.0)
    assert (guard.max_age_steps, guard.guard) == (0, "frozen")


def test_young_data_of_a_different_policy_lowers_its_weight_and_not_the_lag_bound() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(ess=0.2, age=0.0),), 0.0)
    changes = guard.decide(0.0)
    assert guard.max_age_steps is None and guard.source_weights == {SOURCE: 0.4}
    assert [(change.what, change.before, change.after) for change in changes] == [("weight", "1.00", "0.40")]
    assert "ess 0.200" in changes[0].reason


def test_mismatch_lowers_the_weight_too() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(kl=0.4, age=0.0),), 0.0)
    guard.decide(0.0)
    assert guard.source_weights == {SOURCE: 0.25}


def test_small_changes_of_a_weight_are_not_advised() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(ess=0.30, age=0.0),), 0.0)
    guard.decide(0.0)
    guard.report("a", (edge(ess=0.33, age=0.0),), 1.0)
    assert guard.decide(1.0) == [] and guard.source_weights == {SOURCE: 0.6}


def test_one_liar_among_three_reporters_moves_nothing() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(),), 0.0)
    guard.report("b", (edge(),), 0.0)
    guard.report("liar", (edge(ess=0.0, kl=1e9, age=1e9),), 0.0)
    assert guard.decide(0.0) == []
    figures = guard.figures(0.0)[0]
    assert (figures.num_reporters, figures.ess_share, figures.age_mean_steps) == (3, 0.9, 2.0)


def test_a_reporter_counts_once_with_its_newest_figures() -> None:
    guard = Guard(base_max_age_steps=4)
    for _ in range(5):
        guard.report("a", (edge(ess=0.2),), 0.0)
    guard.report("a", (edge(ess=0.8),), 1.0)
    assert [(f.num_reporters, f.ess_share) for f in guard.figures(1.0)] == [(1, 0.8)]


@pytest.mark.parametrize(
    "bad",
    [edge(ess=math.nan), edge(kl=math.inf), edge(ess=2.0), edge(kl=-1.0), edge(groups=0), edge(source="a")],
)
def test_figures_that_cannot_be_and_figures_about_oneself_are_ignored(bad: EdgeReport) -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (bad,), 0.0)
    assert guard.figures(0.0) == []


def test_old_reports_and_those_of_nodes_that_left_no_longer_count() -> None:
    guard = Guard(base_max_age_steps=4, limits=GuardLimits(window_s=10.0))
    guard.report("a", (edge(),), 0.0)
    guard.report("b", (edge(),), 8.0)
    assert [r for r, _, _ in guard.edges(9.0)] == ["a", "b"]
    assert [r for r, _, _ in guard.edges(11.0)] == ["b"]
    guard.forget("b")
    assert guard.figures(11.0) == []


def test_a_node_is_not_advised_about_itself() -> None:
    guard = Guard(base_max_age_steps=4)
    guard.report("a", (edge(ess=0.2, age=0.0), edge(ess=0.1, age=0.0, source=OTHER)), 0.0)
    guard.decide(0.0)
    assert set(guard.advice(SOURCE, 30.0).source_weights) == {OTHER}
    assert set(guard.advice("a", 30.0).source_weights) == {SOURCE, OTHER}
