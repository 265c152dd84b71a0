"""GBPO: the ratio is regressed onto the optimum of a bounded-ratio problem, weighted by the advantage.

    token mean of |(r - tgt) A|, tgt = .8 + .4 sigmoid((R - median) / (std + 1e-6) / 1e-4)

The target is the upper bound above the group's median reward and the lower one below it; the temperature
1e-4 makes it nearly binary. The median is the released quantile .5: of an even group the mean of the middle two. Ours:
half-widths 0.2 of the published 0.2 to 0.3.
"""

import torch

from swarm.objectives.part import Positive, Scope, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import GroupZScore, TokenMean, TokenRatio, group_median, group_statistics
from swarm.objectives.recipe import Recipe


class BoundedRatio(WeightPart):
    """The ratio's distance from the optimum of a bounded-ratio problem, times the size of the advantage."""

    equation = "L_t = |(r - tgt) A|, tgt = 1-low + (low+high) sigmoid((R - median_G) / (std_G + floor) / temperature)"
    scope = Scope.GROUP
    low: float = 0.2  # half-widths
    high: float = 0.2
    temperature: Positive = 1e-4
    floor: Positive = 1e-6

    def __call__(self, scored: Scored) -> TokenLosses:
        rewards, group_index = scored.batch.rewards.double(), scored.batch.group_index
        std = group_statistics(rewards, group_index).std
        share = torch.sigmoid((rewards - group_median(rewards, group_index)) / (std + self.floor) / self.temperature)
        targets = (1 - self.low + (self.low + self.high) * share).to(scored.logprobs.dtype)[:, None]  # [N, 1]
        return unbounded(((torch.exp(scored.log_ratio) - targets) * scored.advantages).abs())


RECIPE = Recipe(
    name="gbpo",
    title="Bounded Ratio Reinforcement Learning",
    acronym="GBPO",
    arxiv="2604.18578",
    verification="code",  # `bounded_ratio_rl` `core_algos.py`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BoundedRatio(),
    aggregate=TokenMean(),
)
