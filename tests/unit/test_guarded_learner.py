"""A learner under the guard: what a level does to a step, and that it survives a restart."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm.config import SAFE_RECIPE, GuardConfig, GuardLimits, ModelConfig
from swarm.learn.guarded_learner import GuardedLearner
from swarm.learn.learner import PolicyLearner
from swarm.learn.off_policy_guard import GuardLevel, GuardState
from swarm.model.network import load_model
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.objectives.recipe import Recipe
from swarm.testing.builders import make_group, make_identity, make_scored
from swarm.testing.tiny_models import make_learner
from swarm.trust_policy import LOW_EVALUATIONS
from swarm.types import Correction, Draw, DrawnGroup, Evaluation, StepReport

MAX_AGE = 8
OWN = make_identity().node_id  # whose groups `make_group` makes


def guarded(dir: Path, limits: GuardLimits, generates: bool = True, is_on: bool = True) -> GuardedLearner:
    network = load_model(ModelConfig(source="tiny", dtype="float32")).network
    learner = make_learner(dir, "sapo_swarm", network=network, policy_id=OWN)
    guard = GuardConfig(enabled=is_on)
    return GuardedLearner(learner, load_recipe(SAFE_RECIPE), guard, MAX_AGE, generates, limits)


def draw(step: int, correction: Correction = Correction.EXACT, age: int = 0) -> Draw:
    """Groups whose claimed log-probs (-0.05 each) are far from what the tiny model makes of the same tokens."""
    groups = [make_group(task_id=task_id, logprob=-0.05) for task_id in (3, 4)]
    return Draw(
        step=step,
        groups=tuple(
            DrawnGroup(scored=make_scored(group, correction=correction), age_steps=age, use=1) for group in groups
        ),
        num_zero_variance=0,
    )


def test_off_policy_steps_go_up_the_levels_until_nothing_is_updated(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1, alarm_kl=0.3, freeze_steps=2))
    reports = [learner.step(draw(step, age=4 if step == 1 else 0)) for step in range(1, 6)]
    levels = [report.diagnostics["guard_level"] for report in reports]
    assert levels[0] == GuardLevel.FROZEN, reports[0].diagnostics
    assert [report.was_skipped for report in reports[1:3]] == [True, True]
    assert reports[1].version == reports[0].version and reports[1].diagnostics["mismatch_kl_k3"] > 0.3
    assert not reports[3].was_skipped, "after a bounded freeze the safe recipe tries"
    assert reports[0].diagnostics["guard_max_age_steps"] == 3, "groups of age 4 looked bad"


def from_elsewhere(drawn: DrawnGroup, policy_id: str) -> DrawnGroup:
    group = replace(drawn.scored.group, policy_id=policy_id)
    return replace(drawn, scored=replace(drawn.scored, group=group, is_made_here=False))


def test_groups_of_a_liar_and_groups_beyond_the_bound_are_left_out(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1))
    own = draw(1).groups[0]
    liar = from_elsewhere(own, "b" * 64)
    first = learner.step(Draw(step=1, groups=(liar,), num_zero_variance=0))
    assert not first.was_skipped and first.diagnostics["guard_held_sources"] == 1
    assert first.diagnostics["guard_level"] == GuardLevel.OPEN, "another policy's claims change nothing else"
    second = learner.step(Draw(step=2, groups=(liar, own), num_zero_variance=0))
    assert (second.num_local, second.num_external) == (1, 0)
    assert second.diagnostics["guard_groups_left_out"] == 1
    third = learner.step(Draw(step=3, groups=(liar,), num_zero_variance=0))
    assert third.was_skipped and third.version == second.version


def test_the_level_of_a_trainer_that_generates_nothing_follows_its_followers(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0))
    theirs = [from_elsewhere(drawn, OWN) for drawn in draw(1).groups]
    report = learner.step(Draw(step=1, groups=tuple(theirs), num_zero_variance=0))
    assert (report.num_local, report.num_from_followers, report.num_external) == (2, 2, 0)
    assert report.diagnostics["guard_level"] == GuardLevel.CAPPED and report.diagnostics["guard_held_sources"] == 0
    assert [edge.source for edge in report.edges] == [OWN], "edges are by who made the groups"


def test_the_guard_wakes_up_where_it_was(tmp_path: Path) -> None:
    config = GuardLimits(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0)
    learner = guarded(tmp_path, config)
    learner.step(draw(1))
    assert learner.state.level is GuardLevel.CAPPED
    learner.save()
    again = guarded(tmp_path, config)
    assert again.state == learner.state
    first, second = learner.step(draw(2)), again.step(draw(2))
    assert (first.version, first.diagnostics) == (second.version, second.diagnostics)


def test_groups_that_the_safe_recipe_has_no_ratio_for_keep_the_own_recipe(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0))
    learner.step(draw(1))
    learner.step(draw(2))
    assert learner.state.level is GuardLevel.SAFE
    assert not learner.step(draw(3, Correction.NO_LOGPROBS)).was_skipped


def test_the_first_level_leaves_out_tokens_that_are_far_off(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0, cap=1.01))
    plain = learner.step(draw(1))
    careful = learner.step(draw(2))
    assert careful.grad_norm < plain.grad_norm


def steps_of_sole_source(learner: GuardedLearner, policy_id: str, num_draws: int) -> list[StepReport]:
    only = from_elsewhere(draw(1).groups[0], policy_id)
    return [learner.step(Draw(step=step, groups=(only,), num_zero_variance=0)) for step in range(1, num_draws + 1)]


def test_a_learner_of_foreign_groups_alone_goes_on_capped_when_every_source_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = GuardLimits(min_tokens=1)
    with caplog.at_level("INFO"):
        reports = steps_of_sole_source(guarded(tmp_path, config, generates=False), "b" * 64, 24)
    wait = config.hold_steps
    assert [report.was_skipped for report in reports] == [False] + [True] * wait + [False] * (23 - wait)
    assert [report.diagnostics["guard_groups_spared"] for report in reports] == [0] * (1 + wait) + [1] * (23 - wait)
    logged = [record.message for record in caplog.records if "set aside" in record.message]
    assert len(logged) == 2, "once when it is set aside, once when it is used all the same"


def test_what_is_spared_is_capped_under_the_safe_recipe_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1, hold_steps=1, alarm_kl=1e6, alarm_ess=0.0), generates=False)
    followers = tuple(from_elsewhere(drawn, OWN) for drawn in draw(1).groups)
    for step in (1, 2):
        learner.step(Draw(step=step, groups=followers, num_zero_variance=0))
    assert learner.state.level is GuardLevel.SAFE
    steps: list[tuple[str, float]] = []
    before = PolicyLearner.step

    def noted(self: PolicyLearner, draw: Draw, recipe: Recipe | None, is_frozen: bool, ratio_band: float) -> StepReport:
        steps.append((recipe.name if recipe else "", math.inf if is_frozen else ratio_band))
        return before(self, draw, recipe, is_frozen, ratio_band)

    monkeypatch.setattr(PolicyLearner, "step", noted)
    reports = steps_of_sole_source(learner, "b" * 64, 3)
    assert [report.diagnostics["guard_groups_spared"] for report in reports] == [0, 0, 1]
    assert steps == [("gspo", math.inf), ("", math.inf), ("gspo", 4.0)], "used, measured, spared"


def test_a_learner_that_makes_groups_never_uses_a_source_set_aside(tmp_path: Path) -> None:
    reports = steps_of_sole_source(guarded(tmp_path, GuardLimits(min_tokens=1)), "b" * 64, 24)
    assert [report.was_skipped for report in reports] == [False] + [True] * 23


def test_a_source_set_aside_is_left_out_again_once_another_appears(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1, hold_steps=2), generates=False)
    liar = from_elsewhere(draw(1).groups[0], "b" * 64)
    group = replace(liar.scored.group, producer="c" * 64)
    other = replace(liar, scored=replace(liar.scored, group=group))
    draws = [(liar,), (liar,), (liar,), (liar,), (liar, other), (liar,)]
    reports = [
        learner.step(Draw(step=step, groups=each, num_zero_variance=0)) for step, each in enumerate(draws, start=1)
    ]
    assert [report.was_skipped for report in reports] == [False, True, True, False, False, True]
    assert [edge.source for edge in reports[4].edges] == ["c" * 64]


def test_a_fall_of_accuracy_ends_although_every_source_is_set_aside(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1), generates=False)
    evaluated(learner, 0.7, 0.72, 0.71, 0.3)
    reports = steps_of_sole_source(learner, "b" * 64, LOW_EVALUATIONS + 8)
    assert all(report.was_skipped for report in reports[:LOW_EVALUATIONS]) and not reports[-1].was_skipped


def test_switched_off_it_is_always_open(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=1), is_on=False)
    reports = [learner.step(draw(step)) for step in (1, 2)]
    assert not any(report.was_skipped for report in reports)
    assert learner.state == GuardState(max_age_steps=MAX_AGE)


@pytest.mark.parametrize("name", ["gspo", "gmpo", "grpo"])
def test_a_token_outside_the_band_has_no_gradient_whatever_the_unit_of_the_ratio(name: str) -> None:
    recipe = load_recipe(name)
    batch = make_batch(draw(1), CharTokenizer())
    logprobs = batch.behavior_logprobs + torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    entropy = torch.zeros_like(logprobs)
    ready = with_advantages(recipe, replace(batch, ratio_band=1.5), "all")
    found = coefficients(recipe, ready, logprobs, entropy)
    is_outside = (logprobs - batch.behavior_logprobs).abs() > math.log(1.5)
    assert bool((is_outside & batch.mask).any()) and bool(found.logprobs.any())
    assert not found.logprobs[is_outside].any()


# --- figures that take nobody's word -----------------------------------------------------------


def evaluated(learner: GuardedLearner, *accuracies: float) -> None:
    for accuracy in accuracies:
        learner.evaluated(
            [
                Evaluation(
                    step=learner.version.step,
                    env="sort",
                    split="held_out",
                    accuracy=accuracy,
                    num_problems=64,
                    majority_baseline=0.1,
                    at_s=0.0,
                )
            ]
        )


def test_after_a_fall_of_held_out_accuracy_only_own_groups_are_used_also_after_a_restart(tmp_path: Path) -> None:
    config = GuardLimits(min_tokens=10**6)
    learner = guarded(tmp_path, config)
    own = draw(1).groups[0]
    other = from_elsewhere(own, "b" * 64)
    both = (own, other)
    evaluated(learner, 0.7, 0.72, 0.71)
    assert learner.step(Draw(step=1, groups=both, num_zero_variance=0)).num_external == 1
    evaluated(learner, 0.3)
    report = learner.step(Draw(step=2, groups=both, num_zero_variance=0))
    assert (report.num_local, report.num_external, report.diagnostics["guard_others_held"]) == (1, 0, 1)
    learner.save()
    again = guarded(tmp_path, config)
    assert again.step(Draw(step=3, groups=both, num_zero_variance=0)).num_external == 0
    evaluated(again, 0.7)
    assert again.step(Draw(step=4, groups=both, num_zero_variance=0)).num_external == 1


@pytest.mark.parametrize("generates", [False, True])
def test_a_trainer_that_only_learns_from_others_does_not_stop_for_good(tmp_path: Path, generates: bool) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=10**6), generates=generates)
    other = from_elsewhere(draw(1).groups[0], "b" * 64)
    evaluated(learner, 0.7, 0.72, 0.71, 0.3)
    draws = [Draw(step=step, groups=(other,), num_zero_variance=0) for step in range(1, LOW_EVALUATIONS + 3)]
    reports = [learner.step(each) for each in draws]
    assert [report.was_skipped for report in reports] == [True] * LOW_EVALUATIONS + [False] * 2
    assert [report.diagnostics["guard_others_held"] for report in reports] == [1] * LOW_EVALUATIONS + [0] * 2
    evaluated(learner, 0.3)
    assert not learner.effect.has_fallen, "it begins anew from there"


def test_draws_that_leave_nothing_end_a_fall_only_in_a_row_also_after_a_restart(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=10**6))
    own = draw(1).groups[0]
    other = from_elsewhere(own, "b" * 64)
    evaluated(learner, 0.7, 0.72, 0.71, 0.3)
    for step in range(1, 3 * LOW_EVALUATIONS):
        learner.step(Draw(step=step, groups=(own if step % LOW_EVALUATIONS == 0 else other,), num_zero_variance=0))
    assert learner.effect.has_fallen
    learner.save()
    again = guarded(tmp_path, GuardLimits(min_tokens=10**6))
    assert again.effect == learner.effect
    again.step(Draw(step=99, groups=(other,), num_zero_variance=0))
    assert not again.effect.has_fallen


def test_a_fall_sets_the_newest_follower_aside_though_everybody_is_established(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=10**6), generates=False)
    known, late = (from_elsewhere(drawn, OWN) for drawn in draw(1).groups)
    late = replace(late, scored=replace(late.scored, group=replace(late.scored.group, producer="c" * 64)))
    learner.step(Draw(step=1, groups=(known,), num_zero_variance=0))
    evaluated(learner, 0.7, 0.7, 0.7)
    learner.step(Draw(step=2, groups=(late, known), num_zero_variance=0))
    evaluated(learner, 0.2)
    learner.save()
    again = guarded(tmp_path, GuardLimits(min_tokens=10**6), generates=False)
    report = again.step(Draw(step=3, groups=(late, known), num_zero_variance=0))
    assert [edge.source for edge in report.edges] == [OWN] and report.diagnostics["guard_others_held"] == 1
    evaluated(again, 0.7)
    report = again.step(Draw(step=4, groups=(late, known), num_zero_variance=0))
    assert len(report.edges) == 2 and report.diagnostics["guard_others_held"] == 0


def test_a_trainer_that_generates_nothing_goes_on_with_established_followers_after_a_fall(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardLimits(min_tokens=10**6), generates=False)
    known, new = (from_elsewhere(drawn, OWN) for drawn in draw(1).groups)
    evaluated(learner, 0.7, 0.7, 0.7, 0.2)
    groups = (known, replace(new, is_established=False))
    report = learner.step(Draw(step=1, groups=groups, num_zero_variance=0))
    assert not report.was_skipped
    assert (report.num_from_followers, report.diagnostics["guard_groups_left_out"]) == (1, 1)
