"""Ratios and the weights that go with them: how they relate to one another, and at the edges.

Derivation: relations are those of the formulas (gspo, at2po, minpro, a3po, dhpo, rl_plus); values by hand.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.objectives.methods import load_recipe
from swarm.objectives.methods.a3po import InterpolatedMismatch, InterpolatedProximalRatio
from swarm.objectives.methods.gspo import SequenceTokenRatio
from swarm.objectives.methods.m2po import SecondMomentClip, widest_cap
from swarm.objectives.methods.minpro import FullPrefixRatio
from swarm.objectives.methods.remix import CentredClip
from swarm.objectives.methods.rl_plus import MixtureRatio
from swarm.objectives.methods.vespo import GammaWeight
from swarm.objectives.part import Scored
from swarm.objectives.parts.clip import Clip
from swarm.objectives.parts.ratio import FullSequenceRatio, SequenceRatio, TokenRatio, TurnRatio, turn_mean
from swarm.objectives.recipe import Recipe
from swarm.testing.batches import toy_batch, toy_scored

MASK = torch.tensor([[True, True, True, False], [True, False, True, True]])


def make_scored(spread: float = 0.5, dtype: torch.dtype = torch.float64) -> Scored:
    """Two rollouts of one group, one local and one external; log-probs drift by `spread` from the generator's."""
    generator = torch.Generator().manual_seed(5)
    drift, further, entropy = torch.randn((3, 2, 4), generator=generator, dtype=torch.float64)
    zeros = torch.zeros((2, 4), dtype=torch.float64)
    behavior = torch.where(MASK, -1.0, zeros)
    batch = toy_batch(
        torch.tensor([1.0, 0.0], dtype=dtype),
        MASK,
        behavior_logprobs=behavior.to(dtype),
        turn_ids=torch.tensor([[0, 0, 1, 1], [7, 7, -3, 7]]),
        age_steps=torch.tensor([0, 3]),
        is_external=torch.tensor([False, True]),
        proximal_logprobs=torch.where(MASK, behavior + 0.5 * spread * further, zeros).to(dtype),
    )
    return toy_scored(
        batch,
        logprobs=torch.where(MASK, behavior + spread * drift, zeros).to(dtype).requires_grad_(),
        entropy=torch.where(MASK, entropy.abs(), zeros).to(dtype),
        advantages=torch.where(MASK, torch.tensor([[1.0], [-1.0]], dtype=torch.float64), zeros).to(dtype),
    )


def gradient(recipe: Recipe, scored: Scored) -> Tensor:
    seen = replace(scored, log_ratio=recipe.ratio(scored))
    losses = torch.where(MASK, recipe.weight(seen).losses, torch.zeros_like(seen.logprobs))
    (found,) = torch.autograd.grad(recipe.aggregate(losses, seen), scored.logprobs)
    return found


@pytest.mark.parametrize("spread", [0.001, 0.5, 3.0])
def test_a_turn_that_is_the_whole_response_has_the_sequence_ratio(spread: float) -> None:
    scored = make_scored(spread)
    scored = replace(scored, batch=replace(scored.batch, turn_ids=torch.zeros((2, 4), dtype=torch.int64)))
    torch.testing.assert_close(TurnRatio()(scored), SequenceTokenRatio()(scored), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(SequenceRatio()(scored), SequenceTokenRatio()(scored), rtol=1e-12, atol=1e-14)


def test_turns_are_told_apart_by_rollout_and_by_any_number() -> None:
    scored = make_scored()
    values = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    found = turn_mean(values, scored.batch.turn_ids, MASK)
    assert found.tolist() == [[0.5, 0.5, 2.0, 2.0], [5.5, 5.5, 6.0, 5.5]]


def test_at_the_last_token_the_prefix_is_the_whole_response() -> None:
    scored = make_scored()
    prefix, whole = FullPrefixRatio()(scored), FullSequenceRatio()(scored)
    assert prefix[0, 2].item() == pytest.approx(whole[0, 2].item(), rel=1e-12)
    assert prefix[1, 3].item() == pytest.approx(whole[1, 3].item(), rel=1e-12)
    assert not prefix[~MASK].any() and not whole[~MASK].any()
    assert prefix[0, 0].item() == pytest.approx(TokenRatio()(scored)[0, 0].item(), rel=1e-12)


@pytest.mark.parametrize("ratio", [SequenceRatio, SequenceTokenRatio, FullSequenceRatio, FullPrefixRatio, TurnRatio])
def test_no_drift_makes_a_ratio_or_its_gradient_infinite(ratio: type[SequenceRatio]) -> None:
    for spread in (1e2, 1e30):
        scored = make_scored(spread, torch.float32)
        logs = ratio()(scored)
        (found,) = torch.autograd.grad(logs.exp().sum(), scored.logprobs)
        assert logs.exp().isfinite().all() and found.isfinite().all()
        assert not logs[~MASK].any()


def test_a_proximal_policy_is_the_generator_at_age_0_and_the_policy_at_great_age() -> None:
    scored = make_scored()
    drift = TokenRatio()(scored)
    ratio, weight = InterpolatedProximalRatio()(scored), InterpolatedMismatch()(scored)
    torch.testing.assert_close(ratio[0], drift[0])
    assert weight[0].tolist() == [1.0] * 4
    torch.testing.assert_close(ratio[1], drift[1] / 4)
    old = replace(scored, batch=replace(scored.batch, age_steps=torch.tensor([10**9, 10**9])))
    torch.testing.assert_close(InterpolatedProximalRatio()(old), torch.zeros_like(drift), atol=1e-8, rtol=0)
    torch.testing.assert_close(InterpolatedMismatch()(old)[MASK], drift.detach().exp()[MASK])


@given(st.floats(0, 0.95), st.floats(-30, 0), st.floats(-30, 0))
@settings(max_examples=50, deadline=None)
def test_no_external_ratio_exceeds_the_bound_of_the_mixture(share: float, new: float, old: float) -> None:
    scored = make_scored()
    proximal = torch.where(MASK, old, torch.zeros((2, 4), dtype=torch.float64))
    seen = replace(
        scored, batch=replace(scored.batch, proximal_logprobs=proximal), logprobs=torch.where(MASK, new, proximal)
    )
    largest = MixtureRatio(share=share)(seen)[1].max().item()
    assert largest <= math.log(2 / (1 - share)) + 1e-9


def test_the_shares_0_and_1_of_the_mix_are_the_sequence_and_the_token_method() -> None:
    scored = make_scored(0.05)
    mix, grpo, gspo = (load_recipe(name) for name in ("dhpo", "grpo", "gspo"))
    token, sequence = (gradient(mix.with_params({"weight.share": share}), scored) for share in (1.0, 0.0))
    torch.testing.assert_close(token, gradient(grpo, scored))
    torch.testing.assert_close(sequence, gradient(gspo, scored))
    assert not torch.allclose(token, sequence)


@given(st.lists(st.integers(0, 32), max_size=12), st.integers(0, 16))
@settings(max_examples=200, deadline=None)
def test_the_widest_cap_is_the_largest_value_that_keeps_the_mean_in_the_budget(
    eighths: list[int], budget_eighths: int
) -> None:
    values, budget = [number / 8 for number in eighths], budget_eighths / 8 + 0.0013  # no mean meets it

    def mean(cap: float) -> float:
        return sum(min(value, cap) for value in values) / len(values)

    found = widest_cap(torch.tensor(values, dtype=torch.float64), budget)
    if not values or mean(math.inf) <= budget:
        assert found == math.inf
        return
    assert found == max((value for value in values if mean(value) <= budget), default=0.0)


def test_a_step_without_harmful_tokens_is_not_clipped() -> None:
    scored = make_scored(spread=2.0)
    shrinking = -scored.advantages * TokenRatio()(scored).abs()
    low, high = SecondMomentClip().bounds(replace(scored, log_ratio=shrinking))
    assert (low, high) == (0.0, math.inf)


def test_the_gamma_weight_is_1_at_1_and_vanishes_on_both_sides_without_overflow() -> None:
    scored = make_scored(dtype=torch.float32)
    for log_ratio, expected in ((0.0, 1.0), (20.0, 0.0), (-20.0, 0.0)):
        seen = replace(scored, log_ratio=torch.full((2, 4), log_ratio))
        losses = GammaWeight()(seen).losses
        weight = (-losses / (scored.advantages * scored.logprobs))[MASK]
        torch.testing.assert_close(weight, torch.full_like(weight, expected), atol=1e-12, rtol=1e-6)


def test_a_clip_centred_on_the_proximal_policy_is_the_ordinary_one_where_that_is_the_generator() -> None:
    scored = make_scored()
    seen = replace(
        scored,
        batch=replace(scored.batch, proximal_logprobs=scored.batch.behavior_logprobs),
        log_ratio=TokenRatio()(scored),
    )
    centred, ordinary = CentredClip(width=0.2)(seen), Clip(low=0.2, high=0.2)(seen)
    torch.testing.assert_close(centred.losses, ordinary.losses)
    moved = replace(seen, batch=scored.batch)
    assert not torch.allclose(CentredClip(width=0.2)(moved).losses, ordinary.losses)
    rho = (scored.proximal - scored.behavior).exp()
    bounds = CentredClip(width=0.2)(replace(moved, log_ratio=torch.full_like(rho, 5.0))).losses
    positive = MASK & (scored.advantages > 0)
    torch.testing.assert_close(bounds[positive], -(rho + 0.2)[positive])
