"""Recipes by kind of rollout: who learns from what, and steps that mix kinds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.config import LearnerConfig, ModelConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.learn.learner import PolicyLearner
from swarm.model.network import load_model
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.fallbacks import MAIN, RecipeSet, merged
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import CorrectionPart, Memory, Requirement, Scored
from swarm.objectives.recipe import Recipe
from swarm.testing.builders import make_group, make_scored
from swarm.testing.tiny_models import make_learner
from swarm.types import Correction, Draw, DrawnGroup

TOKENIZER = CharTokenizer()
PLAIN, NEEDY = load_recipe("sapo_swarm"), load_recipe("grpo")
KINDS = (Correction.EXACT, Correction.TEXT_ONLY, Correction.NO_LOGPROBS, Correction.EXACT, Correction.TEXT_ONLY)


class Counted(CorrectionPart):
    """Changes nothing, needs what only EXACT rollouts have, and counts the rollouts it saw."""

    equation = "1"
    needed: bool = True

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS}) if self.needed else frozenset()

    def initial(self) -> Memory:
        return {"seen": 0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"seen": memory["seen"] + scored.batch.num_rollouts}

    def __call__(self, scored: Scored) -> Tensor:
        return torch.ones_like(scored.logprobs)


def counted(needed: bool) -> Recipe:
    return replace(PLAIN, corrections=(Counted(needed=needed),))


def draw(step: int = 1, kinds: tuple[Correction, ...] = KINDS) -> Draw:
    groups: list[DrawnGroup] = []
    for index, kind in enumerate(kinds):
        rng = np.random.default_rng(10 * step + index)
        texts = ["".join(rng.choice(list("abc"), int(rng.integers(1, 6)))) for _ in range(3)]
        group = make_group("a" * 64, task_id=10 * step + index, tokenizer=TOKENIZER, texts=texts, logprob=-3.5)
        is_made_here = kind is Correction.EXACT
        scored = make_scored(group, rewards=[1.0, 0.0, 0.25], correction=kind, is_made_here=is_made_here)
        groups.append(DrawnGroup(scored=scored, age_steps=0, use=1))
    return Draw(step=step, groups=tuple(groups), num_zero_variance=0)


def learner(folder: Path, recipe: Recipe | RecipeSet, **changes: Any) -> PolicyLearner:
    torch.manual_seed(0)
    network = load_model(ModelConfig(source="tiny", dtype="float32")).network
    config = LearnerConfig(learning_rate=1e-3, token_budget=64, **changes)
    return make_learner(folder, recipe, network=network, config=config, replay=ReplayConfig(external="all"))


def by_kind(main: Recipe, **fallbacks: Recipe) -> RecipeSet:
    return RecipeSet(main=main, fallbacks={Correction(kind): recipe for kind, recipe in fallbacks.items()})


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_of_mixed_kinds_is_the_one_step_that_one_recipe_would_make(tmp_path: Path, updates: int) -> None:
    """The main recipe differs from the fallbacks only in what it needs, so that both ways must meet."""
    mixed = by_kind(counted(needed=True), no_logprobs=counted(needed=False), text_only=PLAIN)
    one = learner(tmp_path / "one", PLAIN, updates_per_step=updates)
    several = learner(tmp_path / "several", mixed, updates_per_step=updates)
    for step in (1, 2):
        plain, found = one.step(draw(step)), several.step(draw(step))
        assert found.loss == pytest.approx(plain.loss, rel=1e-5, abs=1e-8)
        assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
        assert found.num_tokens == plain.num_tokens
        for name, value in plain.diagnostics.items():
            if "micro_batch" not in name and "padding" not in name:
                assert found.diagnostics[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name
    before = load_model(ModelConfig(source="tiny", dtype="float32")).network.state_dict()
    for name, tensor in one.snapshot()[1].items():
        assert not torch.equal(tensor, before[name]) or tensor.numel() < 2, name
        torch.testing.assert_close(several.snapshot()[1][name], tensor, rtol=1e-3, atol=2e-5)


def test_what_parts_remember_is_kept_apart_by_kind_and_survives_a_restart(tmp_path: Path) -> None:
    mixed = by_kind(counted(needed=True), no_logprobs=counted(needed=False), text_only=PLAIN)
    one = learner(tmp_path, mixed)
    one.step(draw(1))
    one.step(draw(2))
    one.save()
    again = learner(tmp_path, mixed)
    again.save()
    for each in (one, again):
        memory = each._memory
        assert memory == {"Counted": {"seen": 12}, "no_logprobs": {"Counted": {"seen": 6}}, "text_only": {}}
    assert one.step(draw(3)).version.digest == again.step(draw(3)).version.digest


def test_every_group_is_in_one_slice_with_the_totals_of_the_step(tmp_path: Path) -> None:
    from swarm.objectives.draw_batch import make_batch

    batch = make_batch(draw(), TOKENIZER)
    slices = by_kind(NEEDY, no_logprobs=PLAIN, text_only=PLAIN).slices(batch)
    assert [each.name for each in slices] == [MAIN, "no_logprobs", "text_only"]
    assert sorted(place for each in slices for place in each.places.tolist()) == list(range(15))
    for each in slices:
        assert each.batch.step_tokens == batch.step_tokens and each.batch.step_groups == 5
        assert each.batch.step_rollouts == 15
        assert torch.equal(each.batch.token_ids, batch.token_ids[each.places])
        assert all(each.recipe.accepts(kind) for kind in each.batch.corrections)
    whole = merged(batch, [replace(each, batch=replace(each.batch, outcomes=each.batch.rewards)) for each in slices])
    assert whole.outcomes is not None and torch.equal(whole.outcomes, batch.rewards)
    assert torch.equal(whole.group_index, batch.group_index) and torch.equal(whole.mask, batch.mask)
    assert whole.corrections == batch.corrections


def test_a_recipe_that_takes_everything_learns_from_everything() -> None:
    chosen = by_kind(PLAIN, text_only=load_recipe("rl_plus"))
    assert chosen.used == {MAIN: PLAIN} and chosen.usable == frozenset(Correction)


def test_without_a_fallback_a_kind_is_neither_usable_nor_learned_from(tmp_path: Path) -> None:
    chosen = by_kind(NEEDY, no_logprobs=PLAIN)
    assert chosen.usable == {Correction.EXACT, Correction.NO_LOGPROBS}
    with pytest.raises(ConfigError, match=r'text_only: set learner\.recipe_text_only = "sapo_swarm"'):
        learner(tmp_path, chosen).step(draw())


def test_a_fallback_that_needs_what_its_kind_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.recipe_text_only: grpo needs behaviour log-probs"):
        by_kind(PLAIN, text_only=NEEDY)


def test_a_recipe_for_one_step_leaves_the_other_kinds_to_those_that_take_them() -> None:
    careful = by_kind(PLAIN, text_only=load_recipe("rl_plus")).with_main(NEEDY)
    assert careful.of(Correction.EXACT) == (MAIN, NEEDY)
    assert careful.of(Correction.NO_LOGPROBS) == ("no_logprobs", PLAIN)
    assert careful.of(Correction.TEXT_ONLY) == ("text_only", PLAIN)
    unchanged = by_kind(NEEDY, text_only=PLAIN).with_main(load_recipe("gspo"))
    assert unchanged.of(Correction.TEXT_ONLY) == ("text_only", PLAIN) and unchanged.of(Correction.NO_LOGPROBS) is None
