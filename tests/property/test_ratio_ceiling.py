"""No recipe lets another node own a step by false log-probs, whichever way it lies.

A property is one test of all recipes; a failure names the recipe and the lie.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm.objectives.batch import RATIO_CEILING, Batch
from swarm.objectives.coefficients import Coefficients, coefficients, scored, with_advantages
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Scope
from swarm.objectives.parts.clip import Surrogate
from swarm.objectives.parts.ratio import FullSequenceRatio
from swarm.objectives.recipe import Recipe
from swarm.testing.batches import toy_batch

NUM_GROUPS, SIZE, LENGTH = 5, 4, 8
LIAR = NUM_GROUPS * SIZE - 4
"""The first rollout of the last group, which is external; it was rewarded, the second was not."""


@functools.cache
def step() -> tuple[Batch, Tensor, Tensor]:
    """(batch, log pi, entropy) of honest groups, the last one external: policies differ by hundredths of a nat."""
    generator = torch.Generator().manual_seed(3)
    count = NUM_GROUPS * SIZE

    def noise(size: float) -> Tensor:
        return size * torch.randn((count, LENGTH), generator=generator, dtype=torch.float64)

    behavior = -2.5 * torch.rand((count, LENGTH), generator=generator, dtype=torch.float64) - 0.3
    group_index = torch.arange(count) // SIZE
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0] * 2 + [0.0, 1.0, 0.0, 0.0] * 2 + [1.0, 0.0, 1.0, 0.0]).double()
    mask = torch.ones((count, LENGTH), dtype=torch.bool)
    batch = toy_batch(
        rewards,
        mask,
        groups=group_index,
        behavior_logprobs=behavior,
        turn_ids=torch.arange(LENGTH).div(4, rounding_mode="floor").expand(count, LENGTH).contiguous(),
        age_steps=torch.ones(count, dtype=torch.int64),
        is_external=group_index == NUM_GROUPS - 1,
        max_new_tokens=torch.full((count,), LENGTH + 2),
        texts=tuple(f"answer {number % 3}" for number in range(count)),
        sources=("a",) * (NUM_GROUPS - 1) + ("b",),
        proximal_logprobs=behavior + noise(0.03),
        reference_logprobs=behavior + noise(0.1),
        baseline_rewards=torch.full((NUM_GROUPS,), 0.25, dtype=torch.float64),
        reference_rewards=torch.full((count,), 0.25, dtype=torch.float64),
        budgets=torch.tensor([4, 6, 8, 10]).repeat(NUM_GROUPS),
        replayed=group_index == 0,
        reward_parts={"correct": rewards, "format": 1 - 0.5 * rewards},
    )
    return batch, behavior + noise(0.05), torch.rand((count, LENGTH), generator=generator, dtype=torch.float64) + 0.2


def lie(batch: Batch, logprobs: Tensor, kind: str) -> tuple[Batch, Tensor]:
    """The step with a lie in the external group; `rare` also takes tokens that we would hardly ever sample."""
    claims, policy = batch.behavior_logprobs.clone(), logprobs.clone()
    if kind == "one token":
        claims[LIAR, 2] = policy[LIAR, 2] - 15.0
    elif kind == "one token of a failure":
        claims[LIAR + 1, 2] = policy[LIAR + 1, 2] - 15.0
    elif kind == "every token a little":
        claims[LIAR] = policy[LIAR] - 2.9
    elif kind == "the bound of admission":
        claims[LIAR] = -100.0
    elif kind == "rare":
        policy[LIAR, 2], claims[LIAR, 2] = -15.0, -0.001
    else:
        policy[LIAR + 1, 2], claims[LIAR + 1, 2] = -15.0, -0.001
    assert batch.proximal_logprobs is not None and batch.reference_logprobs is not None
    moved = policy != logprobs
    proximal, reference = (
        torch.where(moved, policy, values) for values in (batch.proximal_logprobs, batch.reference_logprobs)
    )
    return replace(batch, behavior_logprobs=claims, proximal_logprobs=proximal, reference_logprobs=reference), policy


LIES = ("one token", "one token of a failure", "every token a little", "the bound of admission", "rare", "rare failure")


def found(recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor, external: str) -> Coefficients:
    probes = dict.fromkeys(recipe.probes, torch.ones_like(logprobs))
    ready = with_advantages(recipe, batch, "positive" if external == "positive" else "all")
    return coefficients(recipe, ready, logprobs, entropy, probes)


def pull(of: Coefficients) -> Tensor:
    """Size of each rollout's coefficients, [N]."""
    sizes = of.logprobs.abs().sum(dim=1)
    return sizes if of.entropy is None else sizes + of.entropy.abs().sum(dim=1)


@pytest.mark.parametrize("external", ["positive", "all"])
def test_no_lie_about_log_probs_owns_a_step_or_takes_it_from_others(external: str) -> None:
    batch, logprobs, entropy = step()
    lies = {kind: lie(batch, logprobs, kind) for kind in LIES}
    for recipe in map(load_recipe, list_recipes()):
        honest = pull(found(recipe, batch, logprobs, entropy, external))
        usual = float(honest[honest > 0].median()) if bool(honest.any()) else 0.0
        for kind, (false, policy) in lies.items():
            case = f"{recipe.name}: {kind}"
            after = pull(found(recipe, false, policy, entropy, external))
            culprit, victims = float(after[batch.is_external].max()), float(after[~batch.is_external].sum())
            expected = float(honest[~batch.is_external].sum())
            assert culprit <= 1.05 * RATIO_CEILING * max(usual, float(honest[batch.is_external].max())), case
            assert not kind.startswith("one") or culprit <= 0.5 * float(after.sum()), case
            assert 0.5 * expected <= victims <= 2 * expected, case


def test_the_ceiling_touches_neither_honest_rollouts_nor_our_own() -> None:
    batch, logprobs, entropy = step()
    ours = replace(batch, is_external=torch.zeros_like(batch.is_external))
    cases = [(batch, logprobs), *(lie(ours, logprobs, kind) for kind in LIES)]
    for recipe in map(load_recipe, list_recipes()):
        for number, (of, policy) in enumerate(cases):
            ready, probes = with_advantages(recipe, of, "all"), dict.fromkeys(recipe.probes, torch.ones_like(policy))
            within, without = (
                coefficients(recipe, replace(ready, ratio_ceiling=ceiling), policy, entropy, probes)
                for ceiling in (RATIO_CEILING, math.inf)
            )
            is_same = torch.equal(within.logprobs, without.logprobs) and torch.equal(within.factor, without.factor)
            assert is_same, f"{recipe.name}: {('honest', *LIES)[number]}"


def test_what_is_left_out_is_counted_and_the_ratio_of_a_sequence_is_of_the_others() -> None:
    batch, logprobs, entropy = step()
    false, policy = lie(batch, logprobs, "one token")
    recipe = load_recipe("gspo")
    coefficient = found(recipe, false, policy, entropy, "all")
    assert coefficient.factor[LIAR, 2] == 0 and int((coefficient.factor == 0).sum()) == 1
    seen = scored(recipe, with_advantages(recipe, false, "all"), policy, entropy)
    others = [t for t in range(LENGTH) if t != 2]
    expected = (policy - false.behavior_logprobs)[LIAR, others].mean()
    torch.testing.assert_close(seen.log_ratio[LIAR, others], expected.expand(LENGTH - 1))


@pytest.mark.parametrize("name", ["grpo", "gspo", "prefix_is", "tis", "gbpo"])
def test_the_ceiling_is_the_same_in_every_micro_batch(name: str) -> None:
    recipe, (batch, logprobs, entropy) = load_recipe(name), step()
    for kind in LIES:
        false, policy = lie(batch, logprobs, kind)
        ready = with_advantages(recipe, false, "all")
        whole = coefficients(recipe, ready, policy, entropy)
        size = SIZE if recipe.scope is Scope.GROUP else 1
        for first in range(0, batch.num_rollouts, size):
            rows = list(range(first, first + size))
            part = coefficients(recipe, ready.select(rows), policy[rows], entropy[rows])
            torch.testing.assert_close(part.logprobs, whole.logprobs[rows], rtol=1e-9, atol=1e-12)


def test_recipes_that_ask_for_no_log_probs_are_not_touched_by_any() -> None:
    recipe, (batch, logprobs, entropy) = load_recipe("sapo_swarm"), step()
    honest = found(recipe, batch, logprobs, entropy, "all").logprobs
    false, policy = lie(batch, logprobs, "one token")
    assert torch.equal(found(recipe, false, policy, entropy, "all").logprobs, honest)


def test_a_price_that_is_remembered_is_not_driven_up_by_a_lie() -> None:
    recipe, (batch, logprobs, entropy) = load_recipe("r2vpo"), step()
    prices: list[float] = []
    for of, policy in ((batch, logprobs), lie(batch, logprobs, "one token")):
        memory = recipe.observe(scored(recipe, with_advantages(recipe, of, "all"), policy, entropy))
        (price,) = [value for part in memory.values() for value in part.values()]
        prices.append(float(price))
    assert prices[1] == pytest.approx(prices[0], rel=0.05)


def test_small_lies_do_not_multiply_up_in_the_ratio_of_a_sequence() -> None:
    recipe = replace(load_recipe("grpo"), ratio=FullSequenceRatio(), weight=Surrogate())
    batch, logprobs, entropy = step()
    honest = pull(found(recipe, batch, logprobs, entropy, "all"))
    false, policy = lie(batch, logprobs, "every token a little")
    assert float(pull(found(recipe, false, policy, entropy, "all")).max()) <= 1.05 * RATIO_CEILING * float(honest.max())
