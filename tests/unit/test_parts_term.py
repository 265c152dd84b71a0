"""Terms on small steps worked out by hand, and what the stateful ones remember.

Derivation: gradients of one token are typed here from the formula of the method.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.methods.epo import EntropyBand
from swarm.objectives.methods.grpo_unbiased_kl import ImportanceKl
from swarm.objectives.methods.magic import AdaptiveEntropy
from swarm.objectives.methods.mdpo import MirrorKl
from swarm.objectives.methods.remix import ConvexKl
from swarm.objectives.part import Requirement, Scored, TermPart
from swarm.objectives.parts.kl import EntropyBonus, KlPenalty
from swarm.testing.batches import toy_batch, toy_scored

LENGTHS = (3, 1)


def make_batch(rewards: tuple[float, float] = (1.0, 0.0), memory: Mapping[str, Any] | None = None) -> Batch:
    """Two rollouts of one prompt, three tokens and one; a hole behind the second."""
    mask = torch.arange(3)[None] < torch.tensor(LENGTHS)[:, None]
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    return toy_batch(
        rewards,
        mask,
        proximal_logprobs=torch.where(mask, -1.2, zeros),
        reference_logprobs=torch.where(mask, -1.5, zeros),
        memory=memory or {},
    )


def make_scored(batch: Batch, logprob: float = -0.9, entropy: float = 0.5) -> Scored:
    def leaf(value: float) -> Tensor:
        return torch.where(batch.mask, value, torch.zeros(2, 3, dtype=torch.float64)).requires_grad_()

    return toy_scored(batch, logprobs=leaf(logprob), entropy=leaf(entropy))


def value_and_gradient(term: TermPart, scored: Scored) -> tuple[float, Tensor]:
    value = term(scored)
    (gradient,) = torch.autograd.grad(value, scored.logprobs)
    return float(value.detach()), gradient


GAP = 0.6  # -0.9 + 1.5


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", GAP, 1.0),
        ("k2", GAP**2 / 2, GAP),
        ("k3", math.exp(-GAP) + GAP - 1, 1 - math.exp(-GAP)),
        ("k1+", GAP, GAP),
        ("k3+", math.exp(-GAP) + GAP - 1, GAP),
    ],
)
def test_each_estimator_has_the_value_and_the_gradient_of_its_formula(
    estimator: Any, value: float, slope: float
) -> None:
    found, gradient = value_and_gradient(
        KlPenalty(strength=0.5, estimator=estimator, mean="token"), make_scored(make_batch())
    )
    assert found == pytest.approx(0.5 * value)
    expected = 0.5 * slope / 4
    torch.testing.assert_close(gradient, torch.tensor([[expected] * 3, [expected, 0, 0]], dtype=torch.float64))


def test_importance_weighted_k3_is_unbiased_where_plain_k3_is_not() -> None:
    """Gradient of KL(pi || ref) by enumeration over 3 tokens, against the expectation over a stale sampler."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    sampler = torch.log_softmax(torch.tensor([-0.5, 0.2, 0.1], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (truth,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)

    def expectation(term: TermPart) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for token in range(3):
            one = torch.tensor([[True, False, False], [False] * 3])
            batch = replace(
                make_batch(),
                mask=one,
                step_tokens=1,
                behavior_logprobs=torch.where(one, sampler[token], 0.0),
                reference_logprobs=torch.where(one, reference[token], 0.0),
            )
            scored = replace(make_scored(batch), logprobs=torch.where(one, torch.log_softmax(logits, 0)[token], 0.0))
            (gradient,) = torch.autograd.grad(term(scored), logits)
            total = total + sampler[token].exp() * gradient
        return total

    torch.testing.assert_close(expectation(ImportanceKl(strength=1.0)), truth)
    assert not torch.allclose(expectation(KlPenalty(strength=1.0, mean="token")), truth, rtol=0.05)


def test_extreme_differences_stay_finite_and_what_is_off_the_mask_does_not_count() -> None:
    for estimator in ("k1", "k2", "k3", "k3+"):
        scored = make_scored(make_batch(), logprob=-300.0)
        value, gradient = value_and_gradient(KlPenalty(estimator=estimator), scored)
        assert math.isfinite(value) and bool(gradient.isfinite().all())
        spoiled = replace(scored, logprobs=torch.where(scored.mask, scored.logprobs, torch.nan))
        assert float(KlPenalty(estimator=estimator)(spoiled).detach()) == value


def test_convex_kl_moves_from_the_reference_to_half_and_half() -> None:
    term = ConvexKl()
    assert [term.share(steps) for steps in (0, 50, 51, 60, 61, 90, 100, 5000)] == pytest.approx(
        [1.0, 1.0, 0.9, 0.9, 0.8, 0.6, 0.5, 0.5]
    )
    memory = term.initial()
    for _ in range(3):
        memory = term.observe(memory, make_scored(make_batch()))
    assert memory == {"steps": 3}
    term = ConvexKl(strength=1.0, estimator="k1", mean="token")
    found = float(term(make_scored(make_batch(memory={"ConvexKl": {"steps": 70}}))).detach())
    assert found == pytest.approx(0.8 * 0.6 + 0.2 * 0.3)


def test_mirror_descent_presses_harder_towards_the_end_and_never_divides_by_zero() -> None:
    term = MirrorKl(horizon=4, estimator="k1")
    memory, found = term.initial(), []
    for _ in range(6):
        scored = make_scored(make_batch(memory={"MirrorKl": memory}))
        found.append(float(term(scored).detach()))
        memory = term.observe(memory, scored)
    assert found == pytest.approx([0.3 / t for t in (1, 0.75, 0.5, 0.25, 0.25, 0.25)])
    assert Requirement.SEVERAL_UPDATES in term.needs


def test_an_entropy_bonus_pushes_every_trained_token_alike() -> None:
    scored = make_scored(make_batch())
    (gradient,) = torch.autograd.grad(EntropyBonus(strength=0.2)(scored), scored.entropy)
    torch.testing.assert_close(gradient, torch.tensor([[-0.05] * 3, [-0.05, 0, 0]], dtype=torch.float64))


def test_the_adaptive_strength_follows_a_list_of_entropies() -> None:
    term = AdaptiveEntropy(start=0.01, pace=0.005, target=0.2)
    memory, found = term.initial(), []
    for entropy in (0.1, 0.2, 0.21, 0.3, 0.3, 0.3, 0.3, 0.1):
        memory = term.observe(memory, make_scored(make_batch(), entropy=entropy))
        found.append(memory["strength"])
    assert found == pytest.approx([0.015, 0.02, 0.015, 0.01, 0.005, 0.0, 0.0, 0.005])


def test_the_band_is_around_the_mean_of_past_entropies_and_there_is_none_before_the_first_step() -> None:
    term = EntropyBand(strength=1.0, penalty=0.1, low=0.8, high=1.2, horizon=10)
    memory = term.initial()
    assert float(term(make_scored(make_batch(memory={"EntropyBand": memory}))).detach()) == pytest.approx(-0.5)
    for entropy in (0.4, 0.8):
        memory = term.observe(memory, make_scored(make_batch(), entropy=entropy))
    assert memory == pytest.approx({"steps": 2, "entropy_sum": 1.2})
    for entropy, is_outside in ((0.5, False), (0.7, False), (0.47, True), (0.73, True), (0.4, True), (0.9, True)):
        scored = make_scored(make_batch(memory={"EntropyBand": memory}), entropy=entropy)
        expected = -entropy + 0.1 * term.weight(2) * is_outside
        assert float(term(scored).detach()) == pytest.approx(expected), entropy


def test_the_bands_weight_falls_slowly_then_fast() -> None:
    term = EntropyBand(horizon=100)
    assert term.weight(0) == 1.0
    assert term.weight(50) == pytest.approx(1 - 0.2 * (1 - math.exp(-2)))
    assert term.weight(100) == pytest.approx(0.8 * math.exp(-3)) == term.weight(1000)
    assert all(term.weight(step) > term.weight(step + 1) for step in range(100))
