"""What every recipe must satisfy, whatever its formula."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.batch import Batch
from swarm.learn.objective import Coefficients, Recipe, Scope, coefficients, with_advantages
from swarm.recipes import list_recipes, load_recipe
from swarm.types import Correction

NAMES = list_recipes()
seeds = st.integers(0, 2**31)
names = st.sampled_from(NAMES)


def random_batch(seed: int, width: int = 0) -> tuple[Batch, Tensor]:
    """Four groups of 2 to 5 rollouts, 1 to 6 tokens, `width` columns of padding, float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 6, (4,), generator=generator)
    group_index = torch.repeat_interleave(torch.arange(4), sizes)
    count = len(group_index)
    mask = torch.arange(6)[None] < torch.randint(1, 7, (count, 1), generator=generator)
    behavior = -3 * torch.rand(mask.shape, generator=generator).double() - 0.01
    logprobs = behavior + torch.randn(mask.shape, generator=generator).double()
    rewards = torch.randint(0, 3, (count,), generator=generator).double()
    padding = torch.nn.functional.pad
    mask = padding(mask, (0, width))
    behavior = torch.where(mask, padding(behavior, (0, width)), 0.0)
    return (
        Batch(
            token_ids=torch.zeros(mask.shape, dtype=torch.int64),
            mask=mask,
            behavior_logprobs=behavior,
            rewards=rewards,
            advantages=torch.zeros_like(behavior),
            turn_ids=torch.zeros(mask.shape, dtype=torch.int64),
            group_index=group_index,
            age_steps=torch.zeros(count, dtype=torch.int64),
            is_foreign=group_index >= 2,
            temperature=torch.ones(count),
            corrections=(Correction.EXACT,) * count,
            prompts=(torch.ones(1, dtype=torch.int64),) * 4,
            sources=("a", "a", "b", "c"),
            step_tokens=int(mask.sum()),
            step_rollouts=count,
            step_groups=4,
        ),
        padding(logprobs, (0, width)),
    )


def run(recipe: Recipe, batch: Batch, logprobs: Tensor) -> Coefficients:
    return coefficients(recipe, batch, logprobs, torch.zeros_like(logprobs))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(seeds, names)
def test_the_order_of_rollouts_does_not_matter(seed: int, name: str) -> None:
    recipe = load_recipe(name)
    batch, logprobs = random_batch(seed)
    order = torch.randperm(batch.num_rollouts, generator=torch.Generator().manual_seed(seed))
    plain = run(recipe, with_advantages(recipe, batch, "positive"), logprobs)
    shuffled = run(recipe, with_advantages(recipe, batch.select(order.tolist()), "positive"), logprobs[order])
    close(shuffled.logprobs, plain.logprobs[order])
    assert shuffled.loss == pytest.approx(plain.loss, rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seeds, names, st.integers(1, 5))
def test_padding_does_not_matter_and_nan_behind_the_mask_never_leaks(seed: int, name: str, width: int) -> None:
    recipe = load_recipe(name)
    narrow, wide = random_batch(seed), random_batch(seed, width)
    poisoned = torch.where(wide[0].mask, wide[1], torch.nan)
    plain = run(recipe, with_advantages(recipe, narrow[0], "all"), narrow[1])
    padded = run(recipe, with_advantages(recipe, wide[0], "all"), poisoned)
    close(padded.logprobs[:, :6], plain.logprobs)
    assert not padded.logprobs[:, 6:].any() and padded.logprobs.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([n for n in NAMES if load_recipe(n).scope in (Scope.TOKEN, Scope.ROLLOUT)]), st.data())
def test_any_split_into_micro_batches_adds_up_to_the_whole(seed: int, name: str, data: st.DataObject) -> None:
    recipe = load_recipe(name)
    batch, logprobs = random_batch(seed)
    ready = with_advantages(recipe, batch, "positive")
    part_of = data.draw(st.lists(st.integers(0, 2), min_size=batch.num_rollouts, max_size=batch.num_rollouts))
    whole, loss, joined = run(recipe, ready, logprobs), 0.0, torch.zeros_like(logprobs)
    for part in range(3):
        members = [index for index, number in enumerate(part_of) if number == part]
        if members:
            found = run(recipe, ready.select(members), logprobs[members])
            joined[members] = found.logprobs
            loss += found.loss
    close(joined, whole.logprobs)
    assert loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seeds, names)
def test_on_policy_every_recipe_is_plain_policy_gradient(seed: int, name: str) -> None:
    recipe = load_recipe(name)
    batch, _ = random_batch(seed)
    ready = with_advantages(recipe, batch, "all")
    found = run(recipe, ready, ready.behavior_logprobs)
    expected = -ready.advantages / batch.step_tokens
    if name == "grpo":
        expected = -ready.advantages / ready.mask.sum(dim=1, keepdim=True) / batch.step_rollouts
    close(found.logprobs, expected)
    assert not found.bounded.any()


@settings(max_examples=40, deadline=None)
@given(seeds, names)
def test_groups_without_signal_give_exactly_no_gradient(seed: int, name: str) -> None:
    recipe = load_recipe(name)
    batch, logprobs = random_batch(seed)
    even = replace(
        batch, rewards=torch.where(batch.group_index < 2, torch.full_like(batch.rewards, 0.1), batch.rewards)
    )
    found = run(recipe, with_advantages(recipe, even, "all"), logprobs)
    assert not found.logprobs[batch.group_index < 2].any()


@settings(max_examples=40, deadline=None)
@given(seeds, names)
def test_foreign_negatives_are_removed_without_touching_anything_else(seed: int, name: str) -> None:
    recipe = load_recipe(name)
    batch, _ = random_batch(seed)
    everything, positive = (with_advantages(recipe, batch, rule) for rule in ("all", "positive"))
    dropped = (batch.is_foreign[:, None] & (everything.advantages < 0)) & batch.mask
    assert torch.equal(positive.mask, batch.mask & ~dropped)
    assert torch.equal(positive.advantages[~dropped], everything.advantages[~dropped])
    assert (positive.step_tokens, positive.step_rollouts) == (batch.step_tokens, batch.step_rollouts)


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        ("gpro", {}, "unknown recipe 'gpro'"),
        ("grpo", {"clip": 0.1}, "has no such constant; known: clip_high"),
        ("grpo", {"clip_low": "0.1"}, "expected float, got '0.1'"),
        ("grpo", {"clip_low": True}, "expected float, got True"),
        ("swarm.recipes.grpo:load", {}, "has no 'load'"),
        ("swarm.recipes.grpo:Batch", {}, "not a swarm.learn.objective.Recipe"),
    ],
)
def test_a_wrong_recipe_or_constant_is_named(spec: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(spec, params)


def test_a_constant_is_overridden_by_name_and_a_plug_in_by_place() -> None:
    recipe = load_recipe("swarm.recipes.grpo:RECIPE", {"clip_high": 1})
    assert recipe.params["clip_high"] == 1 and recipe.params["clip_low"] == 0.2
    assert load_recipe("grpo").params["clip_high"] == 0.2
