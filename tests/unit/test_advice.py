"""The off-policy advisor: medians, hysteresis, bounded weights, and a log of every change."""

import math

import pytest

from coordinator.advice import AdvisorLimits, OffPolicyAdvisor
from swarm.config import GuardLimits
from swarm.types import EdgeReport

SOURCE, OTHER = "5" * 64, "6" * 64


def edge(ess: float = 0.9, kl: float = 0.01, age: float = 2.0, source: str = SOURCE, groups: int = 4) -> EdgeReport:
    return EdgeReport(
        source=source, num_groups=groups, age_mean_steps=age, ess_share=ess, mismatch_kl=kl, reward_mean=0.5
    )


def test_without_reports_there_is_no_opinion() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    assert advisor.decide(0.0) == []
    advice = advisor.advice("a", lease_s=30.0)
    assert (advice.max_age_steps, advice.source_weights, advice.state) == (None, {}, "ok")


def test_good_figures_leave_everything_as_it_is() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(),), 0.0)
    assert advisor.decide(0.0) == [] and advisor.state == "ok"


def test_late_data_with_few_effective_samples_halves_the_lag_bound_step_by_step() -> None:
    advisor, bounds = OffPolicyAdvisor(base_max_age_steps=8), []
    for now_s in (0.0, 10.0, 30.0, 60.0, 90.0):
        advisor.report("a", (edge(ess=0.2),), now_s)
        advisor.decide(now_s)
        bounds.append(advisor.max_age_steps)
    assert bounds == [4, 4, 2, 1, 1]
    assert advisor.state == "tightened"


def test_the_bound_never_rises_above_or_is_advised_above_its_base() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=0)
    advisor.report("a", (edge(ess=0.2),), 0.0)
    advisor.decide(0.0)
    assert advisor.max_age_steps == 0


def test_between_tight_and_loose_nothing_changes() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(ess=0.2),), 0.0)
    advisor.decide(0.0)
    advisor.report("a", (edge(ess=0.4),), 40.0)
    assert [change.what for change in advisor.decide(40.0)] == ["weight"]
    assert advisor.max_age_steps == 2


def test_good_figures_give_one_step_back_at_a_time_until_there_is_no_opinion() -> None:
    advisor, bounds = OffPolicyAdvisor(base_max_age_steps=4), []
    advisor.report("a", (edge(ess=0.2),), 0.0)
    advisor.decide(0.0)
    for now_s in (31.0, 62.0, 93.0):
        advisor.report("a", (edge(ess=0.9),), now_s)
        advisor.decide(now_s)
        bounds.append((advisor.max_age_steps, advisor.state))
    assert bounds == [(3, "tightened"), (None, "ok"), (None, "ok")]


def test_the_bound_is_released_when_nobody_reports_late_data_any_more() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=2)
    advisor.report("a", (edge(ess=0.2),), 0.0)
    advisor.decide(0.0)
    assert advisor.max_age_steps == 1
    advisor.decide(200.0)
    assert advisor.max_age_steps is None and advisor.advice("", 1.0).source_weights == {}


@pytest.mark.parametrize("base", [0, 1, 4])
def test_hopeless_figures_raise_the_alarm_and_leave_one_step_of_age(base: int) -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=base)
    advisor.report("a", (edge(ess=0.01),), 0.0)
    advisor.decide(0.0)
    assert (advisor.max_age_steps, advisor.state) == (min(1, base), "alarm")


def test_young_data_of_a_different_policy_lowers_its_weight_and_not_the_lag_bound() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(ess=0.2, age=0.0),), 0.0)
    changes = advisor.decide(0.0)
    assert advisor.max_age_steps is None and advisor.advice("", 1.0).source_weights == {SOURCE: 0.4}
    assert [(change.what, change.before, change.after) for change in changes] == [("weight", "1.00", "0.40")]
    assert "ess 0.200" in changes[0].reason


def test_mismatch_lowers_the_weight_too() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(kl=0.4, age=0.0),), 0.0)
    advisor.decide(0.0)
    assert advisor.advice("", 1.0).source_weights == {SOURCE: 0.25}


def test_small_changes_of_a_weight_are_not_advised() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(ess=0.30, age=0.0),), 0.0)
    advisor.decide(0.0)
    advisor.report("a", (edge(ess=0.33, age=0.0),), 1.0)
    assert advisor.decide(1.0) == [] and advisor.advice("", 1.0).source_weights == {SOURCE: 0.6}


def test_one_liar_among_three_reporters_moves_nothing() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(),), 0.0)
    advisor.report("b", (edge(),), 0.0)
    advisor.report("liar", (edge(ess=0.0, kl=1e9, age=1e9),), 0.0)
    assert advisor.decide(0.0) == []
    figures = advisor.figures(0.0)[0]
    assert (figures.num_parties, figures.ess_share, figures.age_mean_steps) == (3, 0.9, 2.0)


def test_a_reporter_counts_once_with_its_newest_figures() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    for _ in range(5):
        advisor.report("a", (edge(ess=0.2),), 0.0)
    advisor.report("a", (edge(ess=0.8),), 1.0)
    assert [(f.num_parties, f.ess_share) for f in advisor.figures(1.0)] == [(1, 0.8)]


@pytest.mark.parametrize(
    "bad",
    [edge(ess=math.nan), edge(kl=math.inf), edge(ess=2.0), edge(kl=-1.0), edge(groups=0), edge(source="a")],
)
def test_figures_that_cannot_be_and_figures_about_oneself_are_ignored(bad: EdgeReport) -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (bad,), 0.0)
    assert advisor.figures(0.0) == []


def test_old_reports_and_those_of_nodes_that_left_no_longer_count() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4, limits=AdvisorLimits(window_s=10.0))
    advisor.report("a", (edge(),), 0.0)
    advisor.report("b", (edge(),), 8.0)
    assert [r for r, _, _ in advisor.edges(9.0)] == ["a", "b"]
    assert [r for r, _, _ in advisor.edges(11.0)] == ["b"]
    advisor.forget("b")
    assert advisor.figures(11.0) == []


def test_a_node_is_not_advised_about_itself() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    advisor.report("a", (edge(ess=0.2, age=0.0), edge(ess=0.1, age=0.0, source=OTHER)), 0.0)
    advisor.decide(0.0)
    assert set(advisor.advice(SOURCE, 30.0).source_weights) == {OTHER}
    assert set(advisor.advice("a", 30.0).source_weights) == {SOURCE, OTHER}


def test_the_advisor_shares_the_learners_thresholds_and_intervenes_later_than_they_do() -> None:
    limits, learner = AdvisorLimits(), GuardLimits()
    assert (limits.alarm_ess, limits.tight_ess) == (learner.alarm_ess, learner.tight_ess) == (0.05, 0.5)
    assert (limits.alarm_kl, limits.tight_kl) == (learner.alarm_kl, learner.tight_kl) == (1.0, 0.1)
    assert limits.alarm_ess < limits.intervene_ess == 0.30 < limits.tight_ess
    assert limits.alarm_kl > limits.intervene_kl == 0.20 > limits.tight_kl
