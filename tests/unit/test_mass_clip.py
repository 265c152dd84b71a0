"""Weight of other nodes' groups in a step: bounded by own groups, of this step or of those before it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.config import LearnerConfig, ReplayConfig
from swarm.learn import learner as learner_module
from swarm.learn.learner import PolicyLearner
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives import coefficients, mass_clip
from swarm.objectives.batch import Batch, MassClip, Masses
from swarm.objectives.mass_clip import (
    MASS_FACTOR,
    WINDOW,
    MassHistory,
    clip_factors,
    clip_figures,
    reference_masses,
    rollout_masses,
    scope_of,
)
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import Scope
from swarm.testing.batches import toy_batch
from swarm.testing.builders import make_group, make_scored
from swarm.types import Draw, DrawnGroup

OWN, FRIEND, STRANGER = "a" * 64, "b" * 64, "c" * 64


def batch_of(*sources: str, newcomers: tuple[str, ...] = ()) -> Batch:
    """A group of one rollout of each source; `me` is this node."""
    return toy_batch(
        [1.0] * len(sources),
        groups=list(range(len(sources))),
        sources=sources,
        is_external=torch.tensor([source != "me" for source in sources]),
        is_newcomer=torch.tensor([source in newcomers for source in sources]),
    )


def masses_of(*sizes: float) -> torch.Tensor:
    return torch.tensor([[size, size] for size in sizes], dtype=torch.float64)


def clipped(batch: Batch, sizes: list[float], reference: float | None, num_groups: float) -> list[float]:
    of = None if reference is None else Masses(coefficients=reference, pull=reference)
    batch = replace(batch, mass_clip=MassClip(num_groups=num_groups, reference=of))
    factors = clip_factors(batch, masses_of(*sizes))
    return [size * (1.0 if factors is None else float(factors[i])) for i, size in enumerate(sizes)]


def test_a_group_of_another_node_is_scaled_to_its_share_and_an_own_one_never() -> None:
    batch = batch_of("me", "me", "friend", "friend")
    assert clipped(batch, [1.0, 50.0, 1.2, 50.0], 4.0, num_groups=4) == [1.0, 50.0, 1.2, MASS_FACTOR]
    assert clipped(batch, [1.0, 50.0, 1.2, 2.9], 4.0, num_groups=4) == [1.0, 50.0, 1.2, 2.9]


def test_a_last_part_without_mass_of_a_group_that_used_up_its_bound_is_no_division_by_zero() -> None:
    batch = batch_of("me", "friend", "friend")
    used = masses_of(0.0, MASS_FACTOR + 1e-9, MASS_FACTOR + 1e-9)
    clip = MassClip(num_groups=4, reference=Masses(coefficients=4.0, pull=4.0), used=used)
    factors = clip_factors(replace(batch, mass_clip=clip), masses_of(1.0, 0.0, 2.0))
    assert factors is not None and factors.tolist() == [1.0, 1.0, 0.0]


def test_a_newcomer_has_its_share_and_no_more() -> None:
    batch = batch_of("me", "friend", "stranger", "stranger", newcomers=("stranger",))
    assert clipped(batch, [50.0, 50.0, 50.0, 0.9], 4.0, num_groups=4) == [50.0, MASS_FACTOR, 1.0, 0.9]


def test_in_a_step_with_few_groups_the_share_is_that_of_the_usual_number() -> None:
    batch = batch_of("me", "friend")
    assert clipped(batch, [4.0, 4.0], 8.0, num_groups=8) == [4.0, MASS_FACTOR]


def test_a_token_that_is_hardly_ever_drawn_counts_by_its_pull_not_by_its_coefficient_alone() -> None:
    batch = batch_of("me", "friend")
    logprobs = torch.tensor([[-0.1], [-9.0]], dtype=torch.float64)
    masses = rollout_masses(torch.tensor([[1.0], [-1.0]], dtype=torch.float64), None, logprobs, batch.mask)
    assert masses[:, 0].tolist() == [1.0, 1.0] and float(masses[1, 1] / masses[0, 1]) > 10
    clip = MassClip(num_groups=2, reference=reference_masses([(batch, masses)]))
    factors = clip_factors(replace(batch, mass_clip=clip), masses)
    assert factors is not None and factors[0] == 1 and factors[1] < 0.5


def test_the_reference_is_of_own_groups_then_of_the_middle_established_source_then_of_the_middle_newcomer() -> None:
    batch = batch_of("me", "me", "x", "y", "z")
    found = reference_masses([(batch, masses_of(1, 3, 100, 200, 300))])
    assert found is not None and found.coefficients == 2.0 * 5
    batch = batch_of("w", "x", "y", "z", newcomers=("z",))
    found = reference_masses([(batch, masses_of(1, 3, 100, 900))])
    assert found is not None and found.coefficients == 3.0 * 4
    batch = batch_of("x", "y", "z", newcomers=("x", "y", "z"))
    found = reference_masses([(batch, masses_of(1, 3, 900))])
    assert found is not None and found.coefficients == 3.0 * 3
    assert reference_masses([(batch, masses_of(0, 0, 0))]) is None


def test_the_memory_is_the_median_of_a_window_by_recipe() -> None:
    history, grpo, gspo = MassHistory({}), load_recipe("grpo"), load_recipe("gspo")
    own = batch_of("me")
    for size in (*[1.0] * 40, *[500.0] * 20):
        history.observe(grpo, [(own, masses_of(size))])
    clip = history.clip(grpo, 8, [])
    assert clip.reference is not None and clip.reference.coefficients == 1.0
    for _ in range(2 * WINDOW):
        history.observe(grpo, [(own, masses_of(2.0))])
    assert history.clip(grpo, 8, []).reference == Masses(coefficients=2.0, pull=2.0)
    assert len(history.seen["grpo"]) == WINDOW and history.clip(gspo, 8, []).reference is None
    assert MassHistory.from_json(history.seen).seen == history.seen


def test_all_scores_are_needed_at_once_only_where_nothing_is_known_of_a_usual_group() -> None:
    sapo, known = load_recipe("sapo_swarm"), MassClip(num_groups=8, reference=Masses(coefficients=1, pull=1))
    own, mixed = batch_of("me"), batch_of("me", "x")
    first = MassClip(num_groups=8, reference=None)
    assert [scope_of(sapo, replace(own, mass_clip=clip)) for clip in (None, known, first)] == [Scope.TOKEN] * 3
    assert scope_of(sapo, replace(mixed, mass_clip=known)) is Scope.TOKEN
    assert scope_of(sapo, replace(mixed, mass_clip=known), num_ranks=2) is Scope.GROUP
    assert scope_of(sapo, replace(mixed, mass_clip=first)) is Scope.STEP


def test_the_figures_are_what_is_left_after_the_clip() -> None:
    clip = MassClip(num_groups=4, reference=Masses(coefficients=4.0, pull=4.0))
    batch = replace(batch_of("me", "me", "x", "y"), mass_clip=clip)
    assert clip_figures([(batch, masses_of(1, 2, 100, 1))]) == (1, 4 / 7)
    assert clip_figures([(batch, masses_of(0, 0, 0, 0))]) == (0, 0.0)


# --- in a learner ------------------------------------------------------------------------------


def drawn(producer: str, task_id: int, texts: list[str], is_established: bool = True, **changes: Any) -> DrawnGroup:
    group = make_group(producer, task_id=task_id, tokenizer=CharTokenizer(), texts=texts, **changes)
    scored = make_scored(group, rewards=[1.0, 0.0, 1.0, 0.0], is_made_here=producer == OWN)
    return DrawnGroup(scored=scored, age_steps=0, use=1, is_established=is_established)


HONEST = ["12", "7", "31", "5"]
HOSTILE = [6 * text for text in ("q+z*w-(y)", "xxxxxxxxx", "%%%%(((((", "zzqqzzqq/")]


def draw(step: int, texts: list[str], is_established: bool = True) -> Draw:
    groups = [drawn(OWN, number, HONEST) for number in range(4)] + [drawn(FRIEND, 7, HONEST[::-1])]
    return Draw(step=step, groups=(*groups, drawn(STRANGER, 9, texts, is_established)), num_zero_variance=0)


def learner(dir: Path, recipe: str = "sapo_swarm", **config: Any) -> PolicyLearner:
    chosen = LearnerConfig.model_validate({"learning_rate": 1e-3, **config})
    replay = ReplayConfig(local_groups=4, external_groups=2, external="all")
    return PolicyLearner(tiny_network(seed=1), CharTokenizer(), load_recipe(recipe), chosen, replay, OWN, dir)


def weights(of: PolicyLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of.snapshot()[1].items()}


def distance(left: PolicyLearner, right: PolicyLearner) -> float:
    theirs = weights(right)
    return float(sum(((tensor - theirs[name]) ** 2).sum() for name, tensor in weights(left).items()) ** 0.5)


def test_a_heavy_group_is_clipped_from_the_first_step_on_and_the_report_says_so(tmp_path: Path) -> None:
    one = learner(tmp_path)
    for step in (1, 2, 3):
        figures = one.step(draw(step, HOSTILE)).diagnostics
        assert figures["mass_clipped_groups"] == 1
        assert figures["mass_others_share"] < (MASS_FACTOR + 1) / 6 / (5 / 6 + MASS_FACTOR / 6) + 0.05
    honest = learner(tmp_path).step(draw(1, HONEST)).diagnostics
    assert honest["mass_clipped_groups"] == 0 and honest["mass_others_share"] == pytest.approx(2 / 6, abs=0.02)


@pytest.mark.parametrize("recipe", ["sapo_swarm", "dapo", "bapo"])
def test_micro_batches_clip_as_the_whole_step_does(tmp_path: Path, recipe: str) -> None:
    whole, split = learner(tmp_path, recipe), learner(tmp_path, recipe, token_budget=30)
    for step in (1, 2):
        left, right = whole.step(draw(step, HOSTILE)), split.step(draw(step, HOSTILE))
        assert left.diagnostics["num_micro_batches"] < right.diagnostics["num_micro_batches"]
        assert left.diagnostics["mass_clipped_groups"] == right.diagnostics["mass_clipped_groups"] == 1
        assert step > 1 or left.grad_norm == pytest.approx(right.grad_norm, rel=1e-4)  # then parts share the bound


def test_a_step_in_which_nothing_is_clipped_has_the_bits_that_it_has_without_the_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(tmp_path)
    for step in (1, 2, 3):
        one.step(draw(step, HONEST))
    monkeypatch.setattr(learner_module, "scope_of", lambda recipe, batch, num_ranks: recipe.scope)
    monkeypatch.setattr(coefficients, "clip_factors", lambda batch, masses: None)
    other = learner(tmp_path)
    for step in (1, 2, 3):
        other.step(draw(step, HONEST))
    assert one.version.digest == other.version.digest


def test_the_reference_outlives_a_restart(tmp_path: Path) -> None:
    one = learner(tmp_path)
    one.step(draw(1, HONEST))
    one.save()
    again = learner(tmp_path).resume()
    for each in (one, again):
        each.step(draw(2, HOSTILE))
    assert one.version == again.version
    lost = learner(tmp_path).resume()
    lost._masses = mass_clip.MassHistory({})  # pyright: ignore[reportPrivateUsage]
    assert mass_clip.MassHistory.from_json({}).seen == {} and lost.next_draw == 2


def test_what_a_newcomer_sends_changes_neither_what_parts_remember_nor_how_others_are_weighed(tmp_path: Path) -> None:
    seen = [remembered(tmp_path, texts, is_established=False) for texts in (HONEST, HOSTILE)]
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def remembered(dir: Path, texts: list[str], is_established: bool) -> list[float]:
    """Memory of the recipe and the clip after a step."""
    one = learner(dir, "epo")
    one.step(draw(1, texts, is_established))
    band = one._memory["EntropyBand"]  # pyright: ignore[reportPrivateUsage]
    return [band["entropy_sum"], *one._masses.seen["epo"][0]]  # pyright: ignore[reportPrivateUsage]


def test_established_it_would_change_what_parts_remember(tmp_path: Path) -> None:
    seen = [remembered(tmp_path, texts, is_established=True) for texts in (HONEST, HOSTILE)]
    assert seen[0][0] != pytest.approx(seen[1][0], rel=1e-3)


def test_a_draw_of_newcomers_alone_is_learned_from(tmp_path: Path) -> None:
    groups = tuple(drawn(source * 64, 3, HONEST, is_established=False) for source in "def")
    report = learner(tmp_path, "epo").step(Draw(step=1, groups=groups, num_zero_variance=0))
    assert not report.was_skipped and report.diagnostics["mass_others_share"] == 1


@pytest.mark.parametrize("is_established", [True, False])
def test_a_liar_all_of_whose_tokens_are_left_out_does_not_stop_the_learner(
    tmp_path: Path, is_established: bool
) -> None:
    liar = drawn(STRANGER, 3, HONEST, is_established, logprob=-90.0)
    own = drawn(OWN, 3, HONEST)
    one = learner(tmp_path, "hapo")
    assert not one.step(Draw(step=1, groups=(own, liar), num_zero_variance=0)).was_skipped
    one.step(Draw(step=2, groups=(liar,), num_zero_variance=0))
