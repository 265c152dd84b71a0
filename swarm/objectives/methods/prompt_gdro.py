"""Robust prompt weights (Prompt-GDRO): advantages are scaled up for kinds of prompts that have long been hard.

    A <- A min(exp(clip(S_bin, -1, 1)), 2); GRPO with .001 k3 to the reference

The paper plays this and the game over response counts (`rollout_gdro`) independently of each other.
Ours: the constants of the weights (see the part) and the strength of the KL penalty.
"""

import math
from typing import cast

import torch
from torch import Tensor

from swarm.objectives.part import Count, Memory, NotNegative, Positive, PositiveShare, Requirement, Scored, ShapePart
from swarm.objectives.parts import Bins, Clip, GroupZScore, KlPenalty, RolloutMean, TokenRatio
from swarm.objectives.parts.group_statistics import group_statistics
from swarm.objectives.parts.prompts import Prompts, place_of
from swarm.objectives.recipe import Recipe


class RobustWeights(ShapePart):
    """Prompt-GDRO: multiplicative weights over bins of difficulty, realised as a factor on advantages.

    Prompts are sorted into bins by the pass@k of our policy. A bin's score is a moving average of the mean loss
    of the bin's prompts, so that a bin with many prompts counts no more than one with few. Ours: a prompt's loss is 1
    minus its mean reward (the surrogate itself is about 0 for every prompt), and every constant except k and the
    number of bins.
    """

    equation = "A <- A min(exp(rate clip(S_b, -bound, bound)), most), S_b <- EMA of mean loss"
    always_needs = frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})
    rate: NotNegative = 1.0
    bound: NotNegative = 1.0
    most: Positive = 2.0
    pace: PositiveShare = 0.1
    num_bins: Count = 10
    k: Count = 8
    window: Count = 4  # groups of a prompt that count
    margin: NotNegative = 0.02  # hysteresis
    remembers: Count = 4096  # prompts

    def initial(self) -> Memory:
        return {"prompts": {}, "scores": [0.0] * self.num_bins}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        batch = scored.batch
        prompts, scores = cast(Prompts, memory["prompts"]), list(cast("list[float]", memory["scores"]))
        group = group_statistics(batch.rewards, batch.group_index)
        losses: dict[int, list[float]] = {}
        for index in batch.group_index[~batch.is_external].unique().tolist():
            first = int(torch.nonzero(batch.group_index == index)[0])
            key, mean = batch.task_keys[index], float(group.mean[first])
            prompts = self._bins().with_group(prompts, key, mean, int(group.count[first]))
            losses.setdefault(cast(int, place_of(prompts, key)), []).append(1 - mean)
        for place, found in losses.items():
            scores[place] += self.pace * (math.fsum(found) / len(found) - scores[place])
        return {"prompts": prompts, "scores": scores}

    def __call__(self, scored: Scored) -> Tensor:
        memory = self.remembered(scored.batch)
        prompts, scores = cast(Prompts, memory["prompts"]), cast("list[float]", memory["scores"])
        places = [place_of(prompts, key) for key in scored.batch.task_keys]
        factors = [1.0 if place is None else self._factor(scores[place]) for place in places]
        by_group = torch.tensor(factors, dtype=scored.advantages.dtype, device=scored.advantages.device)
        return scored.advantages * by_group[scored.batch.group_index][:, None]

    def _factor(self, score: float) -> float:
        return min(math.exp(self.rate * max(-self.bound, min(score, self.bound))), self.most)

    def _bins(self) -> Bins:
        return Bins(num_bins=self.num_bins, k=self.k, window=self.window, margin=self.margin, limit=self.remembers)


RECIPE = Recipe(
    name="prompt_gdro",
    title="Group Distributionally Robust Optimization-Driven Reinforcement Learning for LLM Reasoning",
    acronym="Prompt-GDRO",
    arxiv="2601.19280",
    verification="ours",
    advantage=GroupZScore(),
    shapers=(RobustWeights(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(KlPenalty(strength=0.001, estimator="k3", to="reference", mean="rollout"),),
)
