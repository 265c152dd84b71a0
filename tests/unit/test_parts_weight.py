"""Weight rules on a few tokens worked out by hand, and what the stateful ones remember.

Derivation: every expected number is typed here from the formula of the method.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm.objectives.methods.a_lol import TrajectoryClip
from swarm.objectives.methods.capo import CurvatureMask
from swarm.objectives.methods.hapo import EntropyClip
from swarm.objectives.methods.kl_cov import CovariancePenalty
from swarm.objectives.methods.r2vpo import RatioVariance
from swarm.objectives.methods.red_weight import ExponentialWeight
from swarm.objectives.methods.spear import (
    RecalibratedReplay,
    ReplayWarmup,
)
from swarm.objectives.methods.topr import TaperedTrajectory
from swarm.objectives.part import Prediction, Scored, WeightPart
from swarm.objectives.parts.clip import CovarianceClip
from swarm.testing.batches import toy_batch, toy_scored


def one_row(ratios: list[float], advantages: list[float], entropies: list[float] | None = None) -> Scored:
    """A single rollout whose tokens have these ratios to the generator, which gave each log-prob -1."""
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    log_ratio = torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)
    entropy = torch.tensor([entropies or [1.0] * len(ratios)], dtype=torch.float64)
    logprobs = (log_ratio - 1).requires_grad_()
    return toy_scored(
        toy_batch([1.0], mask),
        logprobs=logprobs,
        entropy=entropy,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        log_ratio=logprobs + 1,
    )


def pulls(part: WeightPart, scored: Scored) -> list[float]:
    """Minus d(sum of losses)/d(log pi) of each token: positive pushes it up."""
    losses = part(scored).losses.sum()
    if not losses.requires_grad:
        return [0.0] * scored.logprobs.numel()
    (gradient,) = torch.autograd.grad(losses, scored.logprobs, retain_graph=True)
    return [-float(value) for value in gradient.flatten()]


def test_the_price_of_variance_rises_above_the_bound_and_falls_below_it() -> None:
    part = RatioVariance(start=0.04, bound=0.04, rate=0.1)
    spread_out, close = one_row([1.5, 0.5], [1.0, 1.0]), one_row([1.001, 1.0], [1.0, 1.0])
    price = 0.04
    memory = part.initial()
    for scored, variance in ((spread_out, 0.25), (close, 0.0000005), (spread_out, 0.25)):
        memory = part.observe(memory, scored)
        price *= math.exp(0.1 * max(-1.0, min(1.0, variance / 0.04 - 1)))
        assert memory["price"] == pytest.approx(price, rel=1e-9)
    assert json.loads(json.dumps(memory)) == memory


def test_the_price_of_variance_settles_where_the_variance_meets_the_bound() -> None:
    part, memory = RatioVariance(bound=0.04), {"price": 10.0}
    for _ in range(400):
        size = 0.1 / float(memory["price"]) ** 0.5  # a policy that moves less the more it pays
        memory = dict(part.observe(memory, one_row([1 + size, 1 - size], [1.0, 1.0])))
    assert 0.01 / float(memory["price"]) == pytest.approx(0.04, rel=0.01)


def test_the_price_of_variance_stays_within_its_limits() -> None:
    part, far, still = RatioVariance(), one_row([1e6], [1.0]), one_row([1.0], [1.0])
    memory = part.initial()
    for _ in range(200):
        memory = part.observe(memory, far)
    assert memory["price"] == part.most
    for _ in range(200):
        memory = part.observe(memory, still)
    assert memory["price"] == part.least


def test_the_remembered_price_is_what_a_step_pays() -> None:
    scored = one_row([1.5], [2.0])
    priced = replace(scored, batch=replace(scored.batch, memory={"RatioVariance": {"price": 0.5}}))
    assert pulls(RatioVariance(), priced) == pytest.approx([1.5 * (2.0 - 2 * 0.5 * 0.5)])


def test_only_the_asked_share_of_tokens_pays_for_its_covariance() -> None:
    advantages = [1.0] * 50 + [-1.0] * 50
    ratios = [math.exp(place / 100) for place in range(100)]
    scored = one_row(ratios, advantages)
    centred = [advantage * (place - 49.5) for place, advantage in enumerate(advantages)]
    for share, count in ((0.0002, 1), (0.01, 1), (0.039, 3), (1.0, 100)):
        chosen = CovariancePenalty(share=share)(scored).bounded.flatten()
        ranked = sorted(range(100), key=lambda place: -centred[place])[:count]
        assert sorted(chosen.nonzero()[:, 0].tolist()) == sorted(ranked)


def test_covariance_outside_the_bounds_and_clipped_tokens_are_never_dropped() -> None:
    # log-probs -1 +- x, mean -1; advantages mean 0: covariances are A x
    scored = one_row([math.exp(x) for x in (0.1, -0.1, 0.15, -0.15)], [8.0, -8.0, 30.0, -30.0])
    part = CovarianceClip(share=1.0, least=0.5, most=4.0)
    assert part(scored).bounded.flatten().tolist() == [True, True, False, False]
    assert CovarianceClip(share=1.0, least=0.5, most=4.6)(scored).bounded.flatten().tolist() == [True] * 4
    clipped = one_row([math.exp(0.3), math.exp(-0.3)], [8.0, -8.0])
    assert pulls(CovarianceClip(share=1.0, least=0.5, most=4.0), clipped) == [0.0, 0.0]
    assert CovarianceClip(least=2.5, most=4.0, share=1.0)(clipped).losses.flatten().tolist() == pytest.approx(
        [-8 * 1.2, 8 * 0.8]
    )


def test_the_exponential_weight_favours_the_best_and_stays_finite() -> None:
    pull = pulls(ExponentialWeight(temperature=0.5), one_row([1.0, 1.0, 1.0], [1.0, -1.0, 1e4]))
    assert pull == pytest.approx([math.exp(2), -math.exp(-2), 1e4 * math.exp(20)])


def test_a_trajectory_far_off_is_finite() -> None:
    scored = one_row([math.exp(20)] * 60, [-1.0] * 60)
    assert pulls(TrajectoryClip(low=0.9, high=0.9), scored) == pytest.approx([-1.9] * 60)
    assert pulls(TaperedTrajectory(), scored) == pytest.approx([-1.0] * 60)


def test_entropy_is_placed_between_minus_one_and_one() -> None:
    entropy = torch.tensor([[math.exp(-4.0), math.exp(-2.0), 1.0, math.exp(3.0), 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, False]])
    places = EntropyClip(pivot=0.67).places(entropy, mask)
    assert places.flatten().tolist() == pytest.approx([-1.0, -0.5, 0.0, 1.0, 0.0])
    assert not EntropyClip().places(torch.full_like(entropy, 0.7), mask).any()


def test_replay_remembers_the_means_of_fresh_groups_only_and_forgets_the_oldest() -> None:
    part = RecalibratedReplay(history=3)
    batch = replace(toy_batch([0.0, 1.0, 1.0], groups=[0, 0, 1]), age_steps=torch.tensor([0, 0, 2]))
    scored = replace(one_row([1.0], [1.0]), batch=batch)
    memory = part.initial()
    assert not part(batch)[2].any(), "nothing to compare with yet"
    for expected in ([0.5], [0.5, 0.5]):
        memory = part.observe(memory, scored)
        assert memory == {"means": expected}
    newer = replace(scored, batch=replace(batch, rewards=torch.ones(3, dtype=torch.float64)))
    memory = part.observe(part.observe(memory, newer), newer)
    assert memory == {"means": [0.5, 1.0, 1.0]}
    assert json.loads(json.dumps(memory)) == memory


def test_replay_is_judged_by_the_median_of_recent_means_and_never_pushed_down() -> None:
    rewards, ages = [0.0, 1.0, 0.9, 0.1, 0.9], torch.tensor([0, 0, 3, 3, 6])
    memory = {"RecalibratedReplay": {"means": [0.1, 0.4, 0.9]}}
    batch = replace(toy_batch(rewards, groups=[0, 0, 1, 1, 1]), age_steps=ages, memory=memory)
    assert RecalibratedReplay(max_age=5)(batch).tolist() == pytest.approx([-0.5, 0.5, 0.5, 0.0, 0.0])


def test_replay_counts_along_half_a_cosine() -> None:
    part, memory = ReplayWarmup(steps=4), ReplayWarmup().initial()
    scored, weights = one_row([1.0], [1.0]), []
    for _ in range(6):
        old = replace(scored.batch, age_steps=torch.tensor([2]), memory={"ReplayWarmup": memory})
        weights.append(float(part(replace(scored, batch=old))[0, 0]))
        assert float(part(scored)[0, 0]) == 1.0
        memory = part.observe(memory, scored)
    root = math.sqrt(0.5)
    assert weights == pytest.approx([(1 - root) / 2, 0.5, (1 + root) / 2, 1.0, 1.0, 1.0])


def a_prediction(logits: Tensor, hidden: Tensor, target: int, temperature: float) -> Prediction:
    count = logits.shape[0]
    return Prediction(
        hidden=hidden,
        logits=logits,
        targets=torch.full((count,), target),
        temperature=torch.full((count,), temperature, dtype=torch.float64),
    )


@pytest.mark.parametrize("advantage", [0.8, -1.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_curvature_predictions_are_those_of_adams_step_by_autograd(temperature: float, advantage: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(4, generator=generator, dtype=torch.float64)

    def logprob(layer: Tensor) -> Tensor:
        return torch.log_softmax(layer @ hidden / temperature, dim=0)[2]

    (gradient,) = torch.autograd.grad(logprob(weights), weights)
    hessian = torch.autograd.functional.hessian(logprob, weights.detach())
    assert isinstance(hessian, Tensor)
    step = 0.01 * torch.sign(advantage * gradient)  # Adam's first, at a rate of .01
    along, fisher = float((gradient * step).sum()), -float(torch.einsum("ij,ijkl,kl->", step, hessian, step))
    shift, gain = fisher / 2, abs(advantage * along + advantage * (along**2 - fisher) / 2)

    seen = a_prediction((weights.detach() @ hidden)[None], hidden[None], 2, temperature)
    scored = one_row([1.0], [advantage])
    probes = {name: probe(seen)[:, None] for name, probe in CurvatureMask().probes.items()}
    scored = replace(scored, batch=replace(scored.batch, learning_rate=0.01), probes=probes)
    for scale, is_kept in ((0.999, False), (1.001, True)):
        assert bool(CurvatureMask(shift=shift * scale, gain=9.0)(scored)) == is_kept
        assert bool(CurvatureMask(shift=9.0, gain=gain * scale)(scored)) == is_kept


def test_a_larger_learning_rate_masks_more_tokens_and_none_masks_nothing() -> None:
    ratios, generator = [1.0] * 200, torch.Generator().manual_seed(1)
    scored = one_row(ratios, [1.0] * 100 + [-1.0] * 100)
    probes = {
        "hidden_l1": 1500.0 * torch.ones(1, 200, dtype=torch.float64),
        "probability": torch.rand(1, 200, generator=generator, dtype=torch.float64),
    }

    def kept(rate: float) -> int:
        seen = replace(scored, batch=replace(scored.batch, learning_rate=rate), probes=probes)
        return int(CurvatureMask()(seen).sum())

    found = [kept(rate) for rate in (0.0, 1e-6, 1e-5, 1e-4)]
    assert found[0] == found[1] == 200 > found[2] > found[3], found


def test_a_certain_token_and_a_step_without_signal_keep_everything() -> None:
    certain = a_prediction(torch.tensor([[900.0, 0.0, 0.0]], dtype=torch.float64), torch.ones(1, 2), 0, 1.0)
    probes = {name: probe(certain)[:, None] for name, probe in CurvatureMask().probes.items()}
    scored = one_row([1.0], [1.0])
    seen = replace(scored, batch=replace(scored.batch, learning_rate=1.0), probes=probes)
    assert CurvatureMask()(seen).item() == 1
