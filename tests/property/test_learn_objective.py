"""Properties of every recipe, whatever its formula: order, padding, accumulation, the on-policy case.

A property is one test of all recipes: of its time a third was pytest's around a thousand small ones.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.gradient import parts_of
from swarm.learn.step_plan import minibatches
from swarm.objectives import coefficients as objective
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import Coefficients, with_advantages
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Scope
from swarm.objectives.parts.kl import EntropyBonus, KlPenalty
from swarm.objectives.parts.likelihood import Likelihood
from swarm.objectives.parts.ratio import NoRatio
from swarm.objectives.recipe import Recipe
from swarm.testing.batches import toy_batch

NAMES = list_recipes()
SEEDS = range(2)
LENGTH = 6


@functools.cache
def random_batch(seed: int, width: int = 0) -> tuple[Batch, Tensor, Tensor]:
    """(batch, log pi, entropy): four groups of 2 to 5 rollouts, 1 to 6 tokens, `width` columns of padding, float64."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    sizes = torch.randint(2, 6, (4,), generator=generator)
    group_index = torch.repeat_interleave(torch.arange(4), sizes)
    count = len(group_index)
    mask = torch.arange(LENGTH)[None] < torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
    behavior, noise = -3 * uniform(count, LENGTH) - 0.01, uniform(3, count, LENGTH)
    rewards = torch.randint(0, 3, (count,), generator=generator).double() / 2

    def padded(values: Tensor) -> Tensor:
        values = torch.nn.functional.pad(values, (0, width))
        return torch.where(torch.nn.functional.pad(mask, (0, width)), values, torch.zeros_like(values))

    batch = toy_batch(
        rewards,
        torch.nn.functional.pad(mask, (0, width)),
        groups=group_index,
        behavior_logprobs=padded(behavior),
        turn_ids=padded(torch.arange(LENGTH).div(2, rounding_mode="floor").expand(count, LENGTH)),
        age_steps=torch.randint(0, 4, (count,), generator=generator),
        is_external=group_index >= 2,
        max_new_tokens=torch.full((count,), LENGTH),
        is_truncated=mask[:, -1].clone(),
        texts=tuple(f"answer {int(number)}" for number in torch.randint(0, 3, (count,), generator=generator)),
        sources=("a", "a", "b", "c"),
        task_keys=("sums/1", "sums/2", "products/1", "sums/3"),
        proximal_logprobs=padded(behavior + 0.3 * noise[0] - 0.15),
        reference_logprobs=padded(behavior + 0.4 * noise[1] - 0.2),
        baseline_rewards=uniform(4),
        reference_rewards=uniform(count),
        budgets=torch.tensor([2, 4, 6])[torch.arange(count) % 3],
        replayed=group_index == 0,
        reward_parts={"correct": (uniform(count) > 0.5).double(), "format": uniform(count)},
    )
    return batch, padded(behavior + 2 * noise[2] - 1), padded(0.1 + uniform(count, LENGTH))


def steps(width: int = 0) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    for seed in SEEDS:
        yield random_batch(seed, width)


def coefficients(recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Coefficients:
    """The engine's, with a positive number of each token, few of them large, in place of probes."""
    probes = dict.fromkeys(recipe.probes, (0.1 - batch.behavior_logprobs) ** 8)
    return objective.coefficients(recipe, batch, logprobs, entropy, probes)


@functools.cache
def without_external_negatives(name: str, seed: int) -> tuple[Batch, Coefficients]:
    """A step without the external tokens of negative advantage, and its coefficients, as most tests compare with."""
    (batch, logprobs, entropy), recipe = random_batch(seed), load_recipe(name)
    ready = with_advantages(recipe, batch, "positive")
    return ready, coefficients(recipe, ready, logprobs, entropy)


def of_every_recipe(check: Callable[[str], None], names: Iterable[str] = NAMES) -> None:
    """Calls `check` with every name; what it raises is noted with the recipe's."""
    for name in names:
        try:
            check(name)
        except Exception as error:
            error.add_note(f"recipe {name}")
            raise


def entropy_of(found: Coefficients) -> Tensor:
    return torch.zeros_like(found.logprobs) if found.entropy is None else found.entropy


def close(a: Tensor, b: Tensor) -> None:
    assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), f"{a} is not {b}"


DEPENDS_ON_ORDER = {
    "riskpo": "bundles are consecutive rollouts",
    "reinforce_ada": "asks its rollouts one round after the other",
}
"""Recipe -> why the order of rollouts means something to it."""


def test_the_order_of_rollouts_does_not_matter() -> None:
    shuffled_steps = [
        (batch.select(order.tolist()), order, logprobs[order], entropy[order])
        for seed, (batch, logprobs, entropy) in enumerate(steps())
        for order in [torch.randperm(batch.num_rollouts, generator=torch.Generator().manual_seed(seed))]
    ]

    def check(name: str) -> None:
        recipe = load_recipe(name)
        for seed, (batch, order, logprobs, entropy) in enumerate(shuffled_steps):
            _, plain = without_external_negatives(name, seed)
            shuffled = coefficients(recipe, with_advantages(recipe, batch, "positive"), logprobs, entropy)
            close(shuffled.logprobs, plain.logprobs[order])
            close(entropy_of(shuffled), entropy_of(plain)[order])
            assert shuffled.loss == pytest.approx(plain.loss, rel=1e-9, abs=1e-12)

    of_every_recipe(check, [name for name in NAMES if name not in DEPENDS_ON_ORDER])


def test_padding_does_not_matter_and_nan_behind_the_mask_never_leaks() -> None:
    def check(name: str) -> None:
        recipe = load_recipe(name)
        for (batch, *scores), (wide, *padded) in zip(steps(), steps(width=3), strict=True):
            poisoned = (torch.where(wide.mask, values, torch.nan) for values in padded)
            plain = coefficients(recipe, with_advantages(recipe, batch, "all"), *scores)
            found = coefficients(recipe, with_advantages(recipe, wide, "all"), *poisoned)
            for a, b in ((found.logprobs, plain.logprobs), (entropy_of(found), entropy_of(plain))):
                close(a[:, :LENGTH], b)
                assert not a[:, LENGTH:].any() and a.isfinite().all()
            assert found.loss == pytest.approx(plain.loss, rel=1e-9, abs=1e-12)

    of_every_recipe(check)


def random_plan(batch: Batch, seed: int, by_group: bool) -> list[Any]:
    """Trained rollouts spread over three micro-batches; whole groups stay together where asked."""
    generator = torch.Generator().manual_seed(seed)
    unit = batch.group_index if by_group else torch.arange(batch.num_rollouts)
    place = torch.randint(0, 3, (int(unit.max()) + 1,), generator=generator)[unit]
    is_trained = batch.mask.any(dim=1)
    members = [tuple(((place == number) & is_trained).nonzero().flatten().tolist()) for number in range(3)]
    return [SimpleNamespace(members=chosen) for chosen in members if chosen]


@pytest.mark.parametrize("by_group", [True, False])
def test_micro_batches_add_up_to_the_whole(by_group: bool) -> None:
    """With the learner's own rule for what one micro-batch may compute alone."""

    def check(name: str) -> None:
        recipe = load_recipe(name)
        for seed, (_, logprobs, entropy) in enumerate(steps()):
            ready, whole = without_external_negatives(name, seed)
            parts = parts_of(ready, random_plan(ready, seed, by_group), recipe.scope)
            if parts is None:
                assert recipe.scope in (Scope.STEP, Scope.GROUP)
                continue
            assert recipe.scope is not Scope.STEP or len(parts) == 1
            loss, joined, joined_entropy = 0.0, torch.zeros_like(logprobs), torch.zeros_like(entropy)
            for members in parts:
                index = list(members)
                found = coefficients(recipe, ready.select(index), logprobs[index], entropy[index])
                joined[index], joined_entropy[index] = found.logprobs, entropy_of(found)
                loss += found.loss
            close(joined, whole.logprobs)
            close(joined_entropy, entropy_of(whole))
            assert loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)

    of_every_recipe(check)


def on_policy(recipe: Recipe) -> tuple[Batch, Tensor, Tensor]:
    batch, _, entropy = random_batch(0)
    mu = batch.behavior_logprobs
    same = replace(batch, proximal_logprobs=mu, reference_logprobs=mu, age_steps=torch.zeros_like(batch.age_steps))
    ready = with_advantages(recipe, same, "all")
    return ready, ready.behavior_logprobs, entropy


NOT_PLAIN_ON_POLICY = {
    "BoundedRatio": "pulls the ratio to a target that is not 1",
    "DecoupledReward": "weighs likelihoods against each other, not by advantages",
    "CovarianceClip": "drops tokens by covariance, whatever their ratio",
    "CovariancePenalty": "penalises tokens by covariance, whatever their ratio",
    "ExponentialWeight": "weighs by an exponential of the advantage",
    "EntropyClip": "scales advantages by entropy inside the bounds",
    "FinishedOnly": "drops responses that were cut off, whatever their ratio",
    "MixtureRatio": "external tokens have a mixture in the denominator",
    "TemperedLikelihood": "damped by its pull to the old policy, whatever the ratio",
    "TrajectoryRegression": "regresses the log-ratio on the advantage: a scale of 2",
}
"""Part -> why a recipe with it is not the plain policy gradient of its advantages where all policies agree."""

ACTS_WITHOUT_ADVANTAGE = {
    "AnchoredLikelihood": "its anchor pulls every token back",
    "RatioVariance": "prices the variance of every ratio",
    "TrajectoryRegression": "an advantage of 0 is a target too",
}
"""Part -> why it moves tokens whose advantage is 0."""


def listed(recipe: Recipe, reasons: dict[str, str]) -> set[str]:
    return {type(part).__name__ for _, part in recipe.parts} & reasons.keys()


def is_plain_on_policy(recipe: Recipe) -> bool:
    batch, logprobs, entropy = on_policy(recipe)
    found = coefficients(recipe, batch, logprobs, entropy)
    plain = replace(recipe, ratio=NoRatio(), weight=Likelihood(), corrections=())
    expected = coefficients(plain, batch, logprobs, entropy)
    return torch.allclose(found.logprobs, expected.logprobs, rtol=1e-9, atol=1e-12) and not found.bounded.any()


def test_on_policy_a_recipe_is_the_policy_gradient_of_its_advantages_and_no_part_is_listed_in_vain() -> None:
    recipes = [load_recipe(name) for name in NAMES]
    different = [recipe for recipe in recipes if not is_plain_on_policy(recipe)]
    assert [recipe.name for recipe in different if not listed(recipe, NOT_PLAIN_ON_POLICY)] == []
    assert set[str]().union(*(listed(recipe, NOT_PLAIN_ON_POLICY) for recipe in different)) == set(NOT_PLAIN_ON_POLICY)


def test_a_group_whose_advantages_are_zero_gives_exactly_no_gradient() -> None:
    def check(name: str) -> None:
        recipe = replace(load_recipe(name), terms=())
        moved, num_zero_variance = False, 0
        for batch, logprobs, entropy in steps():
            is_even = batch.group_index < 2
            rewards = torch.where(is_even, torch.full_like(batch.rewards, 0.1), batch.rewards)
            ready = with_advantages(recipe, replace(batch, rewards=rewards), "all")
            is_zero_variance = is_even & ~ready.advantages.any(dim=1)
            num_zero_variance += int(is_zero_variance.sum())
            found = coefficients(replace(recipe, shapers=()), ready, logprobs, entropy)
            moved = moved or bool(found.logprobs[is_zero_variance].any() or entropy_of(found)[is_zero_variance].any())
        reasons = listed(recipe, ACTS_WITHOUT_ADVANTAGE) if num_zero_variance else set[str]()
        assert moved == bool(reasons), f"moved {moved}, listed {reasons}"

    of_every_recipe(check)


def test_external_negatives_are_removed_without_touching_anything_else() -> None:
    def check(name: str) -> None:
        for seed, (batch, _, _) in enumerate(steps()):
            everything = with_advantages(load_recipe(name), batch, "all")
            positive, _ = without_external_negatives(name, seed)
            dropped = (batch.is_external[:, None] & (everything.advantages < 0)) & batch.mask
            assert torch.equal(positive.mask, everything.mask & ~dropped)
            assert torch.equal(positive.advantages[~dropped], everything.advantages[~dropped])
            assert (positive.step_tokens, positive.step_rollouts) == (batch.step_tokens, batch.step_rollouts)

    of_every_recipe(check)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_minibatches_hold_each_group_once_with_totals_of_their_own(count: int) -> None:
    batch, _, _ = random_batch(5)
    parts = minibatches(batch, count)
    assert len(parts) == min(count, 4)
    assert sorted(torch.cat([places for places, _ in parts]).tolist()) == list(range(batch.num_rollouts))
    for places, part in parts:
        assert torch.equal(part.mask, batch.mask[places]) and torch.equal(part.rewards, batch.rewards[places])
        keys = [batch.task_keys[group] for group in batch.group_index[places].tolist()]
        assert [part.task_keys[group] for group in part.group_index.tolist()] == keys
        assert part.baseline_rewards is not None and batch.baseline_rewards is not None
        wanted = batch.baseline_rewards[batch.group_index[places]]
        assert torch.equal(part.baseline_rewards[part.group_index], wanted)
        totals = int(part.mask.sum()), len(places), len(set(keys))
        assert (part.step_tokens, part.step_rollouts, part.step_groups) == totals
        assert len(part.prompts) == len(part.sources) == part.step_groups


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        ("gpro", {}, "unknown recipe 'gpro'"),
        ("grpo", {"clip": 0.1}, "has no such constant; known: advantage.floor"),
        ("grpo", {"weight.low": "0.1"}, "expected float, got '0.1'"),
        ("grpo", {"weight": {"low": True}}, "expected float, got True"),
        ("grpo", {"ratio.against": "nobody"}, "neither 'behavior' nor 'proximal'"),
        ("swarm.objectives.methods.grpo:load", {}, "has no 'load'"),
        ("swarm.objectives.methods.grpo:Clip", {}, "not a swarm.objectives.recipe.Recipe"),
    ],
)
def test_a_wrong_recipe_or_constant_is_named(spec: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(spec, params)


def test_a_constant_is_overridden_by_address_and_a_plug_in_by_place() -> None:
    recipe = load_recipe("swarm.objectives.methods.grpo:RECIPE", {"weight": {"high": 1}, "advantage.floor": 1e-4})
    assert recipe.constants["weight.high"] == 1 and recipe.constants["weight.low"] == 0.2
    assert recipe.constants["advantage.floor"] == 1e-4
    assert load_recipe("grpo").constants["weight.high"] == 0.2


def test_two_parts_of_one_class_are_refused_because_they_would_share_address_and_memory() -> None:
    grpo = load_recipe("grpo")
    twice = (EntropyBonus(strength=0.1), EntropyBonus(strength=0.2))
    with pytest.raises(ConfigError, match=r"grpo has two parts called EntropyBonus"):
        replace(grpo, terms=twice)
    both = replace(grpo, terms=(EntropyBonus(strength=0.1), KlPenalty(strength=0.2)))
    assert both.constants["terms.entropy_bonus.strength"] == 0.1
    assert both.with_params({"terms.entropy_bonus.strength": 0.3}).terms[1] == both.terms[1]


def test_no_recipe_changed_the_steps_that_all_of_them_share() -> None:
    for seed in SEEDS:
        for width in (0, 3):
            (kept, *kept_scores), (made, *made_scores) = (
                random_batch(seed, width),
                random_batch.__wrapped__(seed, width),
            )
            for field in fields(made):
                if isinstance(other := getattr(made, field.name), Tensor | dict):
                    torch.testing.assert_close(getattr(kept, field.name), other, rtol=0, atol=0)
            torch.testing.assert_close(kept_scores, made_scores, rtol=0, atol=0)
