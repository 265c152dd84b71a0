"""A learner under the guard: what a level does to a step, and that it survives a restart."""

from pathlib import Path

import pytest

from swarm.config import GuardConfig, LearnerConfig, ModelConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.learn.guard import Level
from swarm.learn.guarded import GuardedLearner
from swarm.learn.learner import PolicyLearner
from swarm.model import load_model
from swarm.parts.correction.band import KnownRatioBand, capped
from swarm.recipes import load_recipe
from swarm.testing import make_group, make_scored
from swarm.types import Correction, Draw, DrawnGroup

MAX_AGE = 8
pytestmark = pytest.mark.timeout(60)  # the first test imports the model library


def guarded(dir: Path, config: GuardConfig) -> GuardedLearner:
    loaded = load_model(ModelConfig(source="tiny", dtype="float32"))
    recipe = load_recipe("swarm_sampling")
    learner = PolicyLearner.open(
        loaded.network, loaded.codec, recipe, LearnerConfig(learning_rate=1e-3), ReplayConfig(), "0" * 64, dir
    )
    careful = {Level.CAPPED: capped(recipe, config.cap), Level.SAFE: load_recipe("sequence_ratio")}
    return GuardedLearner(learner, careful, config, MAX_AGE)


def draw(step: int, correction: Correction = Correction.EXACT) -> Draw:
    """Groups whose claimed log-probs (-0.05 each) are far from what the tiny model makes of the same tokens."""
    groups = [make_group(task_id=task_id, logprob=-0.05) for task_id in (3, 4)]
    return Draw(
        step=step,
        groups=tuple(
            DrawnGroup(scored=make_scored(group, correction=correction), age_steps=4, use=1) for group in groups
        ),
        num_silent=0,
    )


def test_off_policy_steps_go_up_the_levels_until_nothing_is_updated(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardConfig(min_tokens=1, alarm_kl=0.3, freeze_steps=2))
    reports = [learner.step(draw(step)) for step in range(1, 6)]
    levels = [report.diagnostics["guard_level"] for report in reports]
    assert levels[0] == Level.FROZEN, reports[0].diagnostics
    assert [report.was_skipped for report in reports[1:3]] == [True, True]
    assert reports[1].version == reports[0].version and reports[1].diagnostics["mismatch_kl_k3"] > 0.3
    assert not reports[3].was_skipped, "after a bounded freeze the safe recipe tries"
    assert reports[0].diagnostics["guard_max_age_steps"] == 3, "groups of age 4 looked bad"


def test_the_guard_wakes_up_where_it_was(tmp_path: Path) -> None:
    config = GuardConfig(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0)
    learner = guarded(tmp_path, config)
    learner.step(draw(1))
    assert learner.state.level is Level.CAPPED
    learner.save()
    again = guarded(tmp_path, config)
    assert again.state == learner.state
    first, second = learner.step(draw(2)), again.step(draw(2))
    assert (first.version, first.diagnostics) == (second.version, second.diagnostics)


def test_groups_that_the_safe_recipe_has_no_ratio_for_keep_the_own_recipe(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardConfig(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0))
    learner.step(draw(1))
    learner.step(draw(2))
    assert learner.state.level is Level.SAFE
    assert not learner.step(draw(3, Correction.NO_LOGPROBS)).was_skipped


def test_the_first_level_leaves_out_tokens_that_are_far_off(tmp_path: Path) -> None:
    learner = guarded(tmp_path, GuardConfig(min_tokens=1, alarm_kl=1e6, alarm_ess=0.0, cap=1.01))
    plain = learner.step(draw(1))
    careful = learner.step(draw(2))
    assert careful.grad_norm < plain.grad_norm
    with pytest.raises(ConfigError, match="above 1"):
        KnownRatioBand(cap=1.0)
