"""BNPO: binary rewards normalised by a Beta distribution fitted to the success rates of the step's prompts.

    A = (R - p) / Beta(p; 1 + a/3, 1 + b/3), rewards in [0, 1]; clip .2, token mean

The weight follows the spread of the rates; fixed parameters of the Beta would give REINFORCE with baseline
or GRPO. Several rewards are meant to be decomposed first (`gdpo`). Ours: token mean.
"""

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, GroupStatistics, TokenMean, TokenRatio, group_statistics, where_signal
from swarm.objectives.recipe import Recipe

_MOST_WEIGHT = 1e6  # of 1 / density, as released
_SAME = 1e-9  # success rates that differ by less are equal but for rounding


class BetaNormalised(AdvantagePart):
    """Reward minus success rate, divided by the density of a Beta distribution fitted to the step's success rates.

    Rewards are mapped from [lowest, highest] to [0, 1]. Prompts whose rate is common in the step weigh less.
    If all prompts have the same rate, no distribution can be fitted and the weight is 1 (ours).
    """

    equation = "A_i = (R_i - p) / Beta(p; 1 + a/3, 1 + b/3), (a, b) of mean and variance of p over prompts"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # rates of 0 and 1 are part of the distribution
    lowest: float = 0.0
    highest: float = 1.0

    def check(self) -> None:
        if not self.lowest < self.highest:
            raise ConfigError("lowest must be below highest")

    def __call__(self, batch: Batch) -> Tensor:
        rewards = (batch.rewards.to(torch.float64) - self.lowest) / (self.highest - self.lowest)
        rewards = rewards.clamp(0, 1)
        group = group_statistics(rewards, batch.group_index)
        weight = (1 / self._density(group, batch.group_index)).clamp(max=_MOST_WEIGHT)
        return where_signal(weight * (rewards - group.mean), group, batch.rewards)

    def _density(self, group: GroupStatistics, group_index: Tensor) -> Tensor:
        rates = torch.zeros(int(group_index.max()) + 1, dtype=torch.float64, device=group_index.device)
        rates = rates.index_copy(0, group_index, group.mean)[group_index.unique()]  # [M]
        if rates.numel() < 2 or float(rates.max() - rates.min()) < _SAME:
            return torch.ones_like(group.mean)
        mean = rates.mean()
        evidence = mean * (1 - mean) / rates.var() - 1
        alpha, beta = ((1 + evidence * share / 3).clamp(min=1) for share in (mean, 1 - mean))
        normaliser = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        log_density = torch.xlogy(alpha - 1, group.mean) + torch.xlogy(beta - 1, 1 - group.mean)
        return torch.exp(normaliser + log_density)


RECIPE = Recipe(
    name="bnpo",
    title="BNPO: Beta Normalization Policy Optimization",
    acronym="BNPO",
    arxiv="2506.02864",
    verification="code",  # changyi7231/BNPO `bnpo_ray_trainer.py`
    advantage=BetaNormalised(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
