"""Prompt-GDRO's weights and Reinforce-Ada's pool, on small steps against simple models."""

import math
from dataclasses import replace

import pytest
import torch

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.objectives.methods.prompt_gdro import RobustWeights
from swarm.objectives.methods.reinforce_ada import KeptOfPool, kept_of_pool
from swarm.objectives.part import Scored
from swarm.testing.batches import toy_batch, toy_scored


def make_batch(rewards: list[list[float]], external: tuple[int, ...] = ()) -> Batch:
    """One group for each list, one token for each response."""
    groups = [group for group, members in enumerate(rewards) for _ in members]
    return toy_batch(
        torch.tensor([reward for members in rewards for reward in members]),
        groups=groups,
        is_external=torch.tensor([group in external for group in groups]),
    )


def make_scored(batch: Batch) -> Scored:
    ones = torch.ones(batch.mask.shape)
    return toy_scored(batch, entropy=ones, advantages=ones)


def test_bins_that_stay_hard_weigh_more_and_external_groups_do_not_count() -> None:
    part = RobustWeights(pace=0.5, rate=1.0, bound=1.0, most=2.0, k=1)
    batch = make_batch([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]], external=(2,))
    memory = part.initial()
    for _ in range(3):
        memory = part.observe(memory, make_scored(batch))
    assert set(memory["prompts"]) == {"sums/0", "sums/1"}
    assert memory["scores"] == pytest.approx([1 - 0.5**3, *[0.0] * 9])
    found = part(make_scored(replace(batch, memory={"RobustWeights": memory})))
    torch.testing.assert_close(found[:, 0], torch.tensor([*[math.exp(0.875)] * 2, 1.0, 1.0, 1.0, 1.0]).clamp(max=2.0))


def test_a_bins_score_does_not_depend_on_how_many_prompts_are_in_it() -> None:
    part = RobustWeights()
    few = part.observe(part.initial(), make_scored(make_batch([[0.0, 0.0]])))
    many = part.observe(part.initial(), make_scored(make_batch([[0.0, 0.0]] * 5)))
    assert few["scores"] == pytest.approx(many["scores"]) and few["scores"][0] == pytest.approx(0.1)


def test_what_is_remembered_of_prompts_is_bounded() -> None:
    part = RobustWeights(remembers=3)
    memory = part.observe(part.initial(), make_scored(make_batch([[0.0, 1.0]] * 8)))
    assert list(memory["prompts"]) == ["sums/5", "sums/6", "sums/7"]


@pytest.mark.parametrize(
    ("right", "keep", "expected"),
    [
        ("10101010", 4, [0, 1, 2, 3]),
        ("11110000", 4, [0, 1, 4, 5]),
        ("11111110", 4, [0, 1, 2, 7]),
        ("00000001", 4, [0, 1, 2, 7]),
        ("1111", 4, [0, 1, 2, 3]),
        ("0000", 2, [0, 1]),
        ("10", 4, [0, 1]),
        ("11100", 3, [0, 3, 4]),
    ],
)
def test_a_balanced_few_of_the_pool_are_kept(right: str, keep: int, expected: list[int]) -> None:
    assert kept_of_pool([each == "1" for each in right], keep) == expected


def test_the_pools_mean_is_compared_with_and_what_is_not_kept_has_no_gradient() -> None:
    batch = make_batch([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0]])
    recipe = load_recipe("reinforce_ada")
    ready = with_advantages(recipe, batch, "all")
    assert ready.mask[:, 0].tolist() == [True, True, True, False, False, False, True, False, True, True]
    kept = torch.tensor([0.75, -0.25, -0.25, 0, 0, 0, 0.75, 0, -0.5, 0.5])
    torch.testing.assert_close(ready.advantages[:, 0], kept)
    found = coefficients(recipe, ready, -torch.ones(10, 1), torch.ones(10, 1))
    torch.testing.assert_close(found.logprobs[:, 0], -kept / 6)


def test_the_kept_baseline_is_unbiased_where_that_of_the_kept_alone_is_not() -> None:
    """Mean over many pools of the sampled mean, against the success rate of a known policy."""
    generator = torch.Generator().manual_seed(0)
    rate, pools = 0.2, torch.rand(2000, 16, generator=generator) < 0.2
    of_pool, of_kept = list[float](), list[float]()
    for pool in pools:
        rewards = pool.double().tolist()
        kept = kept_of_pool(pool.tolist(), 4)
        of_pool.append(sum(rewards) / 16)
        of_kept.append(sum(rewards[place] for place in kept) / len(kept))
    assert sum(of_pool) / 2000 == pytest.approx(rate, abs=0.01)
    assert sum(of_kept) / 2000 > rate + 0.2


def test_senseless_constants_are_refused() -> None:
    for make in (lambda: KeptOfPool(keep=1), lambda: RobustWeights(pace=0.0), lambda: RobustWeights(num_bins=0)):
        with pytest.raises(ConfigError):
            make()
