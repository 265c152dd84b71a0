"""Constants of parts: the bounds in their types are checked, in alternatives and tuples too."""

from typing import Any, Literal

import pytest

from swarm.errors import ConfigError
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import Count, Part, Positive, Share


class Ranged(Part):
    """A part of nothing but constants."""

    equation = "x"
    width: Positive | None = None
    span: tuple[Share, Share] = (0.0, 1.0)
    lengths: tuple[Count, ...] = ()
    mode: Literal["off", "on"] | Positive = "off"


@pytest.mark.parametrize(
    "values",
    [{}, {"width": 2.0}, {"span": (0.5, 0.5)}, {"lengths": (1, 2, 3)}, {"mode": "on"}, {"mode": 0.5}],
    ids=str,
)
def test_values_that_the_types_allow_are_taken(values: dict[str, Any]) -> None:
    part = Ranged(**values)
    assert all(getattr(part, name) == value for name, value in values.items())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"width": 0.0}, "width: 0.0 must be above 0"),
        ({"width": float("nan")}, "width: nan must be above 0"),
        ({"span": (0.0, 1.5)}, "span: 1.5 must be at least 0 and at most 1"),
        ({"lengths": (3, 0)}, "lengths: 0 must be at least 1"),
        ({"mode": -1.0}, "mode: -1.0 is neither 'off' nor 'on'"),
    ],
    ids=str,
)
def test_values_that_the_types_forbid_are_refused_by_name(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Ranged(**values)


@pytest.mark.parametrize(
    ("recipe", "constants"),
    [
        ("r2vpo", {"weight.start": 20.0}),
        ("r2vpo", {"weight.bound": 0.0}),
        ("gbpo", {"weight.temperature": 0.0}),
        ("clip_cov", {"weight.least": 5.0}),
        ("clip_cov", {"weight.share": 0.0}),
        ("rec_ring", {"weight.far_low": 0.1}),
        ("sapo_soft_gate", {"weight.positive": 0.0}),
        ("red_weight", {"weight.temperature": 0.0}),
        ("aepo", {"weight.preserve": "lower"}),
        ("aspo", {"weight.cap": 1.0}),
        ("stable_reinforce", {"weight.least": 0.0}),
        ("topr_token", {"weight.low": 2.0}),
        ("hapo", {"weight.pivot": 1.5}),
        ("s_ppo", {"weight.reference": 0.0}),
        ("dcpo", {"weight.ceiling": 1.0}),
        ("minirl", {"corrections.truncated_mismatch.cap": 0.0}),
        ("seq_tis", {"corrections.truncated_sequence_mismatch.cap": -1.0}),
        ("icepop", {"corrections.masked_mismatch.low": 1.1}),
        ("seq_mis", {"corrections.masked_sequence_mismatch.high": 0.9}),
        ("geo_rs", {"corrections.geometric_rejection.low": -0.1}),
        ("k3_rs", {"corrections.k3_rejection.limit": -0.1}),
        ("tis_veto", {"corrections.veto.least": 1.0}),
        ("opsm", {"corrections.off_policy_sequence_mask.against": "mu"}),
        ("dppo_tv", {"corrections.probability_difference_mask.low": -0.1}),
        ("dppo_kl", {"corrections.bernoulli_divergence_mask.against": "mu"}),
        ("prime_rl_ipo", {"corrections.probability_band.width": -0.1}),
        ("minirl", {"corrections.sign_gate.against": "mu"}),
        ("m2po_mask", {"corrections.second_moment_mask.budget": 0.0}),
        ("gspo", {"ratio.ceiling": 0.0}),
        ("gspo_token", {"ratio.ceiling": 21.0}),
        ("a2tgpo", {"ratio.against": "mu"}),
        ("bypass_pg_seq_tis", {"ratio.against": ""}),
        ("prefix_is", {"ratio.against": "reference"}),
        ("rl_plus", {"ratio.share": 1.0}),
        ("dhpo", {"weight.share": 1.1}),
        ("dhpo_entropy", {"weight.half": 0.0}),
        ("vespo", {"weight.negative_rate": 0.0}),
        ("m2po", {"weight.budget": 0.0}),
        ("aipo", {"weight.cap": 0.9}),
        ("loop", {"weight.width": 0.0}),
        ("remix", {"weight.width": -0.1}),
        ("ppo", {"advantage.gamma": 0.0}),
        ("ppo", {"advantage.kl": -1.0}),
        ("bnpo", {"advantage.lowest": 1.0, "advantage.highest": 1.0}),
        ("riskpo", {"advantage.bundle": 0}),
        ("riskpo", {"advantage.low": 0.9, "advantage.high": 0.8}),
        ("lead", {"advantage.decay": 1.0}),
        ("xrpo", {"shapers.novelty_sharpening.bound": -0.1}),
        ("dapo", {"rewards.overlong.share": 0.0}),
        ("campo", {"rewards.repeated_tail.penalty": -0.1}),
        ("reinforcement_comparison", {"advantage.rate": 0.0}),
        ("hbpo", {"advantage.cost": -1.0}),
        ("pipo", {"advantage.history": 1}),
        ("grpo_kl", {"terms.kl_penalty.strength": -1.0}),
        ("grpo_kl", {"terms.kl_penalty.estimator": "k4"}),
        ("grpo_kl", {"terms.kl_penalty.to": "nobody"}),
        ("remix", {"terms.convex_kl.every": 0}),
        ("mdpo", {"terms.mirror_kl.horizon": 0}),
        ("epo", {"terms.entropy_band.low": 2.0, "terms.entropy_band.high": 1.0}),
        ("magic", {"terms.adaptive_entropy.pace": -0.1}),
        ("correct_likelihood", {"terms.correct_likelihood.strength": -0.1}),
        ("poise", {"shapers.cross_baseline.directions": 0}),
        ("poise", {"shapers.cross_baseline.ending": 0}),
        ("poise", {"shapers.cross_baseline.ridge": 0.0}),
        ("poise", {"shapers.cross_baseline.decay": 1.0}),
        ("fg_expo", {"prompts.width": 0.0}),
        ("fg_expo", {"prompts.pace": 0.0}),
        ("fg_expo", {"prompts.remembers": 0}),
        ("reinforce_ada", {"prompts.rounds": 0}),
        ("reinforce_ada", {"prompts.rule": "none"}),
        ("rollout_gdro", {"prompts.least": 1}),
        ("rollout_gdro", {"prompts.num_bins": 0}),
    ],
)
def test_a_constant_of_a_recipe_that_makes_no_sense_is_refused_by_name(recipe: str, constants: dict[str, Any]) -> None:
    name = next(iter(constants)).rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"^(?!.*(no such constant|expected)).*\b{name}\b"):  # by the part itself
        load_recipe(recipe, constants)
