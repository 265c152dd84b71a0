"""Robust rollout counts (Rollout-GDRO): more responses to prompts whose rewards vary, at a fixed mean of responses.

    GRPO with .001 k3 to the reference

The game over the weights of prompts is `prompt_gdro`. Ours: the computation of the counts and its constants (see
`RobustCounts`), where the paper learns the counts by EXP3P; and the strength of the KL penalty.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Annotated, cast

from swarm.errors import ConfigError
from swarm.objectives.part import Bound, Count, Memory, NotNegative, PositiveShare, PromptPart, Requirement
from swarm.objectives.parts import Bins, Clip, GroupZScore, KlPenalty, Prompts, RolloutMean, TokenRatio, place_of
from swarm.objectives.recipe import Recipe


def best_counts(variances: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Returns the counts n_i in [least, most] that add up to `total` and minimise the sum of v_i / n_i.

    The greedy solution, which adds each response where it lowers the sum most, is exact, because the sum is separable
    and convex. Without the bounds, n_i ~ sqrt(v_i). Counts of prompts with equal variance differ by one at most.

    Args:
        variances: v_i >= 0 of one response's reward.
        total: sum of the counts, between `least` and `most` times the number of prompts.
        least: >= 1.
        most: >= least.
    """
    assert least * len(variances) <= total <= most * len(variances), (total, least, most)
    counts = [least] * len(variances)

    def gain(index: int) -> tuple[float, int, int]:
        count = counts[index]
        return (-variances[index] / (count * (count + 1)), count, index)

    heap = [gain(index) for index in range(len(variances)) if least < most]
    heapq.heapify(heap)
    for _ in range(total - least * len(variances)):
        _, _, index = heapq.heappop(heap)
        counts[index] += 1
        if counts[index] < most:
            heapq.heappush(heap, gain(index))
    return counts


class RobustCounts(PromptPart):
    """Rollout-GDRO: more responses to bins of prompts whose rewards vary, at a fixed mean number of responses.

    Prompts are sorted into bins by pass@k; a bin's variance is a moving average of p (1 - p). Ours: the paper learns
    the count of each bin by EXP3P with a price on responses; here the underlying problem, the least sum of variance
    over responses at a fixed total, is solved for each round. A round of fewer than `pool` prompts is solved together
    with the prompts asked last, and later rounds make up for responses beyond the mean. Every constant except k and
    the number of bins is ours. A new prompt counts with the largest variance, 1/4.
    """

    equation = "min sum_q v_b(q) / n_q, sum_q n_q = n Q, least <= n_q <= most; v_b <- EMA of p (1 - p)"
    always_needs = frozenset({Requirement.REPEATED_PROMPTS, Requirement.VARIED_GROUPS})
    num_bins: Count = 10
    k: Count = 8
    window: Count = 4  # groups of a prompt that count
    margin: NotNegative = 0.02  # hysteresis
    pace: PositiveShare = 0.1
    least: Annotated[int, Bound(at_least=2)] = 2
    most: int = 16
    pool: Count = 8  # prompts among which responses are shared out
    remembers: Count = 4096  # prompts

    def check(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"least: {self.least} responses, most: {self.most}")

    def initial(self) -> Memory:
        return {"prompts": {}, "variances": [0.25] * self.num_bins, "asked": [0, 0]}

    def seen(self, memory: Memory, key: str, rewards: Sequence[float]) -> Memory:
        mean = min(1.0, max(0.0, math.fsum(rewards) / len(rewards)))
        prompts = self._bins().with_group(cast(Prompts, memory["prompts"]), key, mean, len(rewards))
        variances = list(cast("list[float]", memory["variances"]))
        place = place_of(prompts, key)
        assert place is not None
        variances[place] += self.pace * (mean * (1 - mean) - variances[place])
        num_prompts, num_responses = cast("list[int]", memory["asked"])
        asked = [num_prompts + 1, num_responses + len(rewards)]
        return {"prompts": prompts, "variances": variances, "asked": asked}

    def counts(self, memory: Memory, keys: Sequence[str], group_size: int, largest: int) -> list[int]:
        prompts, variances = cast(Prompts, memory["prompts"]), cast("list[float]", memory["variances"])
        recent = list(prompts)[len(prompts) - max(0, min(len(prompts), self.pool - len(keys))) :]
        places = [place_of(prompts, key) for key in (*keys, *recent)]
        spread = [0.25 if place is None else variances[place] for place in places]
        least, most = min(self.least, group_size), max(min(self.most, largest), group_size)
        num_prompts, num_responses = cast("list[int]", memory["asked"])
        owed = group_size * num_prompts - num_responses
        total = group_size * len(spread) + (owed if recent else 0)
        total = min(max(total, least * len(spread)), most * len(spread))
        return best_counts(spread, total, least, most)[: len(keys)]

    def _bins(self) -> Bins:
        return Bins(num_bins=self.num_bins, k=self.k, window=self.window, margin=self.margin, limit=self.remembers)


RECIPE = Recipe(
    name="rollout_gdro",
    title="Group Distributionally Robust Optimization-Driven Reinforcement Learning for LLM Reasoning",
    acronym="Rollout-GDRO",
    arxiv="2601.19280",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(KlPenalty(strength=0.001, estimator="k3", to="reference", mean="rollout"),),
    prompts=RobustCounts(),
)
