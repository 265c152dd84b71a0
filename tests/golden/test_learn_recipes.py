"""Each recipe typed a second time, from its paper's formula, as plain loops over Python floats.

Derivation: the formula sheet entries quoted in each function. Nothing of `swarm.parts` is used here; the
gradient of the typed surrogate with respect to every log-prob is compared in float64.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarm.learn.batch import Batch
from swarm.learn.objective import coefficients, with_advantages
from swarm.recipes import load_recipe
from swarm.types import Correction

Loss = Callable[[Batch, Tensor], Tensor]


def ragged_batch(seed: int, spread: float) -> tuple[Batch, Tensor]:
    """Three groups of unequal size, ragged masks with holes, one group of equal rewards; float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes, length = [4, 3, 5], 6
    group_index = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    count = sum(sizes)
    mask = torch.zeros(count, length, dtype=torch.bool)
    for row in mask:
        row[: int(torch.randint(1, length + 1, (1,), generator=generator))] = True
    mask &= torch.rand(mask.shape, generator=generator) > 0.15
    mask[:, 0] = True
    rewards = torch.randint(0, 4, (count,), generator=generator).double() / 3
    rewards[group_index == 1] = 0.1
    behavior = -3 * torch.rand(mask.shape, generator=generator).double() - 0.01
    logprobs = behavior + spread * torch.randn(mask.shape, generator=generator).double()
    batch = Batch(
        token_ids=torch.ones(mask.shape, dtype=torch.int64),
        mask=mask,
        behavior_logprobs=torch.where(mask, behavior, torch.zeros_like(behavior)),
        rewards=rewards,
        advantages=torch.zeros(mask.shape, dtype=torch.float64),
        turn_ids=torch.zeros(mask.shape, dtype=torch.int64),
        group_index=group_index,
        age_steps=torch.randint(0, 5, (count,), generator=generator),
        is_foreign=group_index == 2,
        temperature=torch.ones(count),
        corrections=(Correction.EXACT,) * count,
        prompts=(torch.ones(2, dtype=torch.int64),) * 3,
        sources=("a", "b", "c"),
        step_tokens=int(mask.sum()),
        step_rollouts=count,
        step_groups=3,
    )
    return batch, logprobs


def z_scores(batch: Batch, floor: float) -> list[float]:
    """A_i = (R_i - mean_G) / (std_G + floor), unbiased std; equal rewards give 0 (entries 3.3 and 6.16)."""
    rewards, groups = batch.rewards.tolist(), batch.group_index.tolist()
    scores: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if max(members) == min(members):
            scores.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        variance = math.fsum((r - mean) ** 2 for r in members) / (len(members) - 1)
        scores.append((reward - mean) / (math.sqrt(variance) + floor))
    return scores


def trained(batch: Batch) -> list[list[int]]:
    return [[t for t, is_trained in enumerate(row) if is_trained] for row in batch.mask.tolist()]


def bound(ratio_log: Tensor) -> Tensor:
    return ratio_log if abs(ratio_log.item()) <= 20 else ratio_log.detach().clamp(-20, 20)


def clipped_term(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    inside = ratio if low <= ratio.item() <= high else ratio.detach().clamp(low, high)
    first, second = ratio * advantage, inside * advantage
    return -(first if first.item() <= second.item() else second)


def grpo(batch: Batch, logprobs: Tensor) -> Tensor:
    """(1/N) sum_i (1/|o_i|) sum_t -min(r A, clip(r, .8, 1.2) A), r = pi/mu (entries 2.1, 3.3, 4.2)."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (advantage, tokens) in enumerate(zip(z_scores(batch, 1e-6), trained(batch), strict=True)):
        for t in tokens:
            ratio = bound(logprobs[i, t] - batch.behavior_logprobs[i, t]).exp()
            total = total + clipped_term(ratio, advantage, 0.8, 1.2) / len(tokens) / batch.step_rollouts
    return total


def swarm_sampling(batch: Batch, logprobs: Tensor) -> Tensor:
    """Token mean of -min(r A, clip(r, .8, 1.28) A) with the consumer's own old log-probs (entry 6.16)."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (advantage, tokens) in enumerate(zip(z_scores(batch, 1e-8), trained(batch), strict=True)):
        for t in tokens:
            ratio = (logprobs[i, t] - logprobs[i, t].item()).exp()
            total = total + clipped_term(ratio, advantage, 0.8, 1.28) / batch.step_tokens
    return total


def min_prefix_ratio(batch: Batch, logprobs: Tensor) -> Tensor:
    """Token mean of -sg[clip(min_{j<t} r_j * r_t, 0, 2)] A log pi; 1 for the empty prefix (entry 1.5)."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (advantage, tokens) in enumerate(zip(z_scores(batch, 1e-6), trained(batch), strict=True)):
        ratios: list[float] = []
        for t in tokens:
            gap = (logprobs[i, t] - batch.behavior_logprobs[i, t]).item()
            ratios.append(math.exp(max(-20.0, min(20.0, gap))))
            weight = min(2.0, max(0.0, min(ratios[:-1], default=1.0) * ratios[-1]))
            total = total - weight * advantage * logprobs[i, t] / batch.step_tokens
    return total


def flat_ratios(batch: Batch, logprobs: Tensor) -> list[tuple[Tensor, float, float]]:
    """(ratio, advantage, sampling probability) of every trained token."""
    found: list[tuple[Tensor, float, float]] = []
    for i, (advantage, tokens) in enumerate(zip(z_scores(batch, 1e-6), trained(batch), strict=True)):
        for t in tokens:
            gap = bound(logprobs[i, t] - batch.behavior_logprobs[i, t])
            found.append((gap.exp(), advantage, math.exp(float(batch.behavior_logprobs[i, t]))))
    return found


def balanced_clip(batch: Batch, logprobs: Tensor) -> Tensor:
    """Released code of entry 2.17: lower bound first, unweighted pos/neg against 1, dual clip 3."""
    tokens = flat_ratios(batch, logprobs)

    def quotient(low: float, high: float) -> float:
        effective = [(min(r.item(), high) if a >= 0 else max(r.item(), low)) * a for r, a, _ in tokens]
        positive, negative = sum(max(e, 0.0) for e in effective), sum(max(-e, 0.0) for e in effective)
        return math.inf if negative == 0 else positive / (negative + 1e-8)

    low, high = 0.6, 1.2
    while quotient(low, high) < 1.0 and low < 0.8:
        low = min(low + 0.05, 0.8)
    while quotient(low, high) < 1.0 and high < 2.0:
        high = min(high + 0.05, 2.0)
    total = torch.zeros((), dtype=torch.float64)
    for ratio, advantage, _ in tokens:
        loss = clipped_term(ratio, advantage, low, high)
        if advantage < 0 and loss.item() > -3.0 * advantage:
            loss = loss.detach() * 0
        total = total + loss / batch.step_tokens
    return total


def balanced_clip_paper(batch: Batch, logprobs: Tensor) -> Tensor:
    """Algorithm 1 of entry 2.17: upper bound first, share weighted by the sampling probability, target .4."""
    tokens = flat_ratios(batch, logprobs)

    def share(low: float, high: float) -> float:
        def term(ratio: float, advantage: float, lower: float) -> float:
            return abs(min(ratio * advantage, max(lower, min(ratio, high)) * advantage))

        positive = sum(p * term(r.item(), a, 0.0) for r, a, p in tokens if a > 0)
        everything = sum(p * term(r.item(), a, low if a < 0 else 0.0) for r, a, p in tokens)
        return positive / everything

    step, low, high = 0, 0.6, 1.2
    while share(low, high) < 0.4 and low + 0.02 <= 0.9 + 1e-9:
        step += 1
        if high + 0.05 <= 3.0 + 1e-9:
            high += 0.05
        else:
            low += 0.02
    total = torch.zeros((), dtype=torch.float64)
    for ratio, advantage, _ in tokens:
        total = total + clipped_term(ratio, advantage, low, high) / batch.step_tokens
    return total


TYPED: dict[str, Loss] = {
    "grpo": grpo,
    "swarm_sampling": swarm_sampling,
    "min_prefix_ratio": min_prefix_ratio,
    "balanced_clip": balanced_clip,
    "balanced_clip_paper": balanced_clip_paper,
}


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 15.0], ids=["on_policy", "near", "far", "extreme"])
@pytest.mark.parametrize("name", sorted(TYPED))
@pytest.mark.parametrize("seed", range(8))
def test_recipe_has_the_gradient_of_its_paper(seed: int, name: str, spread: float) -> None:
    batch, logprobs = ragged_batch(seed, spread)
    leaf = logprobs.clone().requires_grad_()
    loss = TYPED[name](batch, leaf)
    (expected,) = torch.autograd.grad(loss, leaf)
    recipe = load_recipe(name)
    found = coefficients(recipe, with_advantages(recipe, batch, "all"), logprobs, torch.zeros_like(logprobs))
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-10, atol=1e-14)
    assert expected.abs().max() > 0 or spread == 15.0, "nothing was compared"


def test_both_forms_of_balanced_clip_move_their_bounds_somewhere_in_these_batches() -> None:
    from swarm.parts.weight import BoundSearch, balanced_bounds

    for name in ("balanced_clip", "balanced_clip_paper"):
        recipe = load_recipe(name)
        numbers = {key: value for key, value in recipe.params.items() if key not in ("dual_clip", "std_floor")}
        bounds: set[tuple[float, float]] = set()
        for seed in range(8):
            batch, logprobs = ragged_batch(seed, 2.0)
            ready = with_advantages(recipe, batch, "all")
            ratio = (logprobs - batch.behavior_logprobs).clamp(-20, 20).exp()
            behavior = batch.behavior_logprobs.exp()
            bounds.add(balanced_bounds(ratio, ready.advantages, behavior, ready.mask, BoundSearch(**numbers)))
        assert len(bounds) > 1, bounds
