"""Advantages, rewards and shapes against hand-worked numbers, and what their stateful parts remember.

Derivation: the numbers are worked out beside each test from the formula of the method.
"""

import json
import math
import statistics
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.methods.adora import UsefulGroups
from swarm.objectives.methods.bnpo import BetaNormalised
from swarm.objectives.methods.campo import RepeatedTail, ends_in_a_loop
from swarm.objectives.methods.dcpo import CumulativeScore, RolloutMeanSum
from swarm.objectives.methods.drpo import PromptSum
from swarm.objectives.methods.gdpo import PerRewardScore
from swarm.objectives.methods.hapo import TokenGroupScore
from swarm.objectives.methods.hapo_history import HistoryLength
from swarm.objectives.methods.lead import LengthBalance
from swarm.objectives.methods.mc_grpo import MedianDeviation
from swarm.objectives.methods.opo import LengthWeightedBaseline
from swarm.objectives.methods.pass_at_k_grpo import BestOfGroup
from swarm.objectives.methods.pipo import ImprovementFeedback
from swarm.objectives.methods.reinforcement_comparison import PromptTracker
from swarm.objectives.methods.riskpo import BundleRisk
from swarm.objectives.methods.scale_rl import GroupMean
from swarm.objectives.part import AdvantagePart, Memory, RewardPart
from swarm.objectives.parts.advantage import (
    BatchDeviation,
    GroupCentred,
    GroupZScore,
    Overlong,
    whitened,
)
from swarm.objectives.parts.aggregate import ConstantLength, RolloutSum
from swarm.objectives.parts.group_statistics import group_scores
from swarm.testing.batches import toy_batch, toy_scored


def step(
    rewards: list[list[float]],
    lengths: list[list[int]] | None = None,
    limit: int = 8,
    keys: tuple[str, ...] = (),
    memory: dict[str, Memory] | None = None,
) -> Batch:
    """A step with these rewards by group; every response of two tokens unless `lengths` says otherwise."""
    lengths = lengths or [[2] * len(group) for group in rewards]
    length = torch.tensor([one for group in lengths for one in group])
    width = max(1, int(length.max()))
    return toy_batch(
        [one for group in rewards for one in group],
        torch.arange(width)[None] < length[:, None],
        groups=[index for index, group in enumerate(rewards) for _ in group],
        max_new_tokens=torch.full(length.shape, limit),
        task_keys=keys or tuple(f"task/{index}" for index in range(len(rewards))),
        memory=dict(memory or {}),
    )


def close(found: Tensor, expected: list[float]) -> bool:
    return torch.allclose(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-9, atol=1e-9)


FLAT = (
    GroupZScore(),
    GroupCentred(),
    LengthWeightedBaseline(),
    BestOfGroup(),
    BatchDeviation(),
    MedianDeviation(),
    TokenGroupScore(),
    BetaNormalised(),
    UsefulGroups(),
)


@pytest.mark.parametrize("part", FLAT, ids=lambda part: type(part).__name__)
def test_a_group_of_equal_rewards_gets_exactly_zero(part: AdvantagePart) -> None:
    # 0.1 has no exact mean of three in binary, so a careless mean leaves a remainder.
    found = part(step([[0.1, 0.1, 0.1], [0.0, 1.0]], [[1, 3, 2], [2, 5]]))
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert bool((found[3:] != 0).any())


@pytest.mark.parametrize("part", FLAT, ids=lambda part: type(part).__name__)
def test_an_advantage_has_the_dtype_of_the_rewards(part: AdvantagePart) -> None:
    batch = step([[0.0, 1.0, 1.0]])
    assert part(replace(batch, rewards=batch.rewards.float())).dtype == torch.float32


def test_a_group_of_which_more_than_half_agree_is_scaled_by_its_standard_deviation() -> None:
    # One of four stands out by 1: std 1/2, and three zeros are made up for. The released floor alone gave 4000.
    found = MedianDeviation(floor=0.0)(step([[0.0, 0.0, 0.0, 1.0]]))
    assert close(found, [0.0, 0.0, 0.0, 8.0])


def test_token_statistics_fall_back_to_the_group_where_they_go_far() -> None:
    # One success of one token beside 40 wrong tokens: p = 1/41, (1 - p) / sqrt(p (1 - p)) = sqrt(40) = 6.3 > 5.
    batch = step([[1.0, 0.0, 0.0], [1.0, 0.0]], [[1, 20, 20], [1, 3]])
    found = TokenGroupScore(floor=0.0)(batch)
    spread = statistics.stdev([1.0, 0.0, 0.0])
    assert close(found[:3], [(2 / 3) / spread, (-1 / 3) / spread, (-1 / 3) / spread])
    assert close(found[3:], [math.sqrt(3), -1 / math.sqrt(3)])


def test_prompts_of_one_rate_leave_nothing_to_fit() -> None:
    assert close(BetaNormalised()(step([[0.0, 1.0], [1.0, 0.0]])), [-0.5, 0.5, 0.5, -0.5])


def test_whitening_of_equal_values_is_zero_and_of_others_has_unit_variance() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    assert float(whitened(torch.full((2, 2), 0.3, dtype=torch.float64), mask, 1e-8).abs().max()) == 0.0
    white = whitened(torch.tensor([[1.0, 2.0], [6.0, math.nan]], dtype=torch.float64), mask, 0.0)
    assert float(white[mask].var()) == pytest.approx(1.0) and float(white[1, 1]) == 0.0


def test_named_rewards_are_weighted() -> None:
    parts = {"a": torch.tensor([0.0, 1.0, 1.0]), "b": torch.tensor([1.0, 0.0, 1.0])}
    batch = replace(step([[0.0, 0.0, 0.0]]), reward_parts=parts)
    only_a = PerRewardScore(weights="b=0")(batch)
    assert torch.equal(only_a[1], only_a[2]) and float(only_a[0, 0]) < 0 < float(only_a[1, 0])
    for broken in ("a", "a=x", "a=1=2"):
        with pytest.raises(ConfigError, match="weights"):
            PerRewardScore(weights=broken)


def test_a_response_beyond_its_declared_limit_is_not_blown_up() -> None:
    batch = step([[1.0, 1.0]], [[4, 4]], limit=1)
    losses = torch.ones(2, 4, dtype=torch.float64)
    assert float(ConstantLength()(losses, toy_scored(batch))) == pytest.approx(1.0)
    assert close(Overlong(share=0.5)(batch), [0.0, 0.0])


def test_the_aggregates_add_up_over_micro_batches() -> None:
    batch = step([[1.0, 0.0], [1.0, 0.0, 0.5]], [[1, 3], [2, 4, 1]])
    losses = torch.where(batch.mask, torch.rand(batch.mask.shape, dtype=torch.float64), 0.0)
    for aggregate in (RolloutSum(), ConstantLength(), PromptSum(), RolloutMeanSum()):
        whole = float(aggregate(losses, toy_scored(batch)))
        parts = [float(aggregate(losses[rows], toy_scored(batch.select(rows)))) for rows in ([0, 3], [4], [1, 2])]
        assert sum(parts) == pytest.approx(whole), type(aggregate).__name__
    by_group = [float(losses[:2].sum()) / 4, float(losses[2:].sum()) / 7]
    assert float(GroupMean()(losses, toy_scored(batch))) == pytest.approx(sum(by_group) / 2)


def test_a_loop_at_the_end_is_found_as_by_trying_every_length() -> None:
    random, found = Random(5), 0
    for _ in range(400):
        tokens = [random.randrange(3) for _ in range(random.randrange(9))]
        tried = any(tokens[-2 * size : -size] == tokens[-size:] for size in range(1, len(tokens) // 2 + 1))
        assert ends_in_a_loop(tokens) == tried, tokens
        found += tried
    assert 50 < found < 350


def test_only_a_loop_that_was_cut_off_costs() -> None:
    batch = step([[1.0, 1.0, 1.0]], [[4, 4, 4]], limit=4)
    ids = torch.tensor([[7, 8, 7, 8], [7, 8, 7, 8], [5, 6, 7, 8]])
    batch = replace(batch, token_ids=ids, is_truncated=torch.tensor([True, False, True]))
    assert close(RepeatedTail(penalty=0.25)(batch), [0.75, 1.0, 1.0])


def run(part: AdvantagePart | RewardPart, batches: list[Batch]) -> list[Tensor]:
    """Results of the part on successive steps, its memory passing through JSON as in a checkpoint."""
    memory, found = part.initial(), list[Tensor]()
    for batch in batches:
        batch = replace(batch, memory={type(part).__name__: json.loads(json.dumps(memory))})
        found.append(part(batch))
        memory = part.observe(part.remembered(batch), toy_scored(batch))
    return found


def test_cumulative_scores_are_those_of_all_rewards_so_far() -> None:
    random = Random(3)
    visits = [[random.choice([0.0, 0.25, 1.0]) for _ in range(random.choice([3, 4]))] for _ in range(6)]
    visits[2] = [1.0, 1.0, 1.0]
    found = run(CumulativeScore(), [step([rewards, [0.0, 1.0]], keys=("a", "b")) for rewards in visits])
    for index, rewards in enumerate(visits):
        everything, i = [reward for visit in visits[: index + 1] for reward in visit], index + 1

        def z(reward: float, among: list[float]) -> float:
            return (reward - statistics.mean(among)) / statistics.stdev(among) if len(set(among)) > 1 else 0.0

        for place, reward in enumerate(rewards):
            now, total = z(reward, rewards), z(reward, everything)
            mixtures = ((i - 1) / i * now + total / i, now / i + (i - 1) / i * total)
            assert float(found[index][place]) == pytest.approx(min(mixtures, key=abs), abs=1e-9)
    assert bool((found[2][:3] != 0).all()), "a flat visit learns from earlier ones"


def test_a_prompt_is_compared_with_its_own_past() -> None:
    steps = [step([[1.0, 0.0], [0.2]], keys=("a", "b")), step([[1.0], [1.0]], keys=("a", "c"))]
    first, second = run(PromptTracker(rate=0.5), steps)
    assert close(first, [0.6, -0.4, -0.2])  # nothing is known: the mean of the step, 0.4
    assert close(second, [0.5, 0.0])
    seen_twice = step([[1.0], [0.0]], keys=("a", "a"))
    assert PromptTracker(rate=0.5).observe({"prompts": {"a": 0.0}}, toy_scored(seen_twice)) == {"prompts": {"a": 0.25}}


def test_the_previous_draw_is_reinforced_as_far_as_rewards_rose() -> None:
    part = ImprovementFeedback(history=3, negative=0.5, most=2.0, floor=0.0)
    replayed = torch.tensor([True, True, False, False])

    def again(new: list[float], means: list[float]) -> Batch:
        batch = step([[1.0, 0.0], new], memory={"ImprovementFeedback": {"means": means}})
        return replace(batch, replayed=replayed)

    # Means 0.2, 0.4, 0.6: mean 0.4, deviation 0.2; a pair's shares are 1 and -1.
    assert close(part(again([0.6, 0.4], [9.0, 0.2, 0.4, 0.6]))[:2], [0.5, -0.5])
    assert close(part(again([0.2, 0.4], [0.2, 0.4, 0.6]))[:2], [-0.25, 0.25]), "rewards fell: taken back, half as much"
    assert close(part(again([9.0, 7.0], [0.2, 0.4, 0.6]))[:2], [2.0, -2.0]), "held at the bound"
    assert close(part(again([0.6, 0.4], [0.2])), [0.0, 0.0, math.sqrt(0.5), -math.sqrt(0.5)])


def test_only_new_rewards_enter_the_history() -> None:
    part = ImprovementFeedback(history=2)
    batch = step([[1.0, 0.0], [0.5, 0.25]])
    mixed = replace(batch, replayed=torch.tensor([True, True, False, False]))
    assert part.observe({"means": [0.1, 0.2]}, toy_scored(mixed)) == {"means": [0.2, 0.375]}
    alone = replace(batch, replayed=torch.ones(4, dtype=torch.bool))
    assert part.observe({"means": [0.1, 0.2]}, toy_scored(alone)) == {"means": [0.1, 0.2]}


def test_the_shortest_success_of_a_prompt_is_remembered() -> None:
    part = HistoryLength()
    rewards = [[1.0, 0.0, 1.0]]
    steps = [step(rewards, [lengths], keys=("a",)) for lengths in ([4, 1, 6], [2, 4, 8], [4, 4, 4])]
    first, second, third = run(part, steps)
    assert first.tolist() == rewards[0], "nothing is known yet"
    assert close(second, [1 + math.cos(math.pi / 4), 0.0, 1 - 0.7])  # record 4: half as long, as long, twice
    assert close(third, [1 - 0.7, -1.0, 1 - 0.7])  # record 2 now


def test_a_record_is_of_outcomes_and_not_of_shaped_rewards() -> None:
    batch = step([[0.3, 1.2]], [[3, 5]], keys=("a",))
    shaped = replace(batch, outcomes=torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert HistoryLength().observe({"prompts": {}}, toy_scored(shaped)) == {"prompts": {"a": 3}}


def test_quantiles_of_bundles_are_tracked() -> None:
    part = BundleRisk(bundle=2, low=0.2, high=0.8, rate=0.1)
    # Two bundles (the last group is left over and makes its own); papers score 1+0, 0+1, 1+1 and 0, 1, 0.
    batch = step([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    scores = [1.0, 1.0, 2.0, 0.0, 1.0, 0.0]
    first = part.observe(part.initial(), toy_scored(batch))
    quantiles = torch.tensor(scores, dtype=torch.float64).quantile(torch.tensor([0.2, 0.8], dtype=torch.float64))
    assert first["quantiles"] == pytest.approx(quantiles.tolist())
    batch = replace(batch, memory={"BundleRisk": {"quantiles": [0.5, 1.5]}})
    after = part.observe(part.remembered(batch), toy_scored(batch))
    assert after["quantiles"] == pytest.approx([0.5 + 0.1 * (0.2 - 2 / 6), 1.5 + 0.1 * (0.8 - 5 / 6)])


def test_a_bundle_whose_papers_all_score_the_same_is_not_divided_by_its_deviation() -> None:
    part = BundleRisk(bundle=2)
    all_wrong = step([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], memory={"BundleRisk": {"quantiles": [0.5, 1.5]}})
    # Tail -0.5 / 0.2, times 1.5 / 2.5, half of it for each member: it was -5e5 with the released 1e-6.
    assert close(part(all_wrong).round(decimals=4), [-0.75] * 6)


def test_the_proportion_moves_to_what_is_unsettled() -> None:
    part = LengthBalance()
    solved = step([[1.0, 1.0], [1.0, 1.0]], [[2, 6], [3, 8]])  # nothing left to win by correctness
    unsolved = step([[0.0, 1.0], [0.0, 0.0]], [[4, 4], [4, 4]])  # one success, right at its target
    down = part.observe({"weight": 0.5}, toy_scored(replace(solved, memory={"LengthBalance": {"weight": 0.5}})))
    up = part.observe({"weight": 0.5}, toy_scored(replace(unsolved, memory={"LengthBalance": {"weight": 0.5}})))
    assert down["weight"] == pytest.approx(0.95 * 0.5) and up["weight"] == pytest.approx(0.95 * 0.5 + 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_differ_by_a_rounding_have_no_scores_without_a_floor_either(dtype: torch.dtype) -> None:
    one = torch.tensor(0.7, dtype=dtype)
    values = torch.stack([one, one, one, one.nextafter(torch.tensor(1.0, dtype=dtype)), one * 0 + 0.1, one, one, one])
    scores = group_scores(values, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 0.0)
    assert scores[:4].abs().max() < 0.05 and scores[4:].abs().max() > 1
