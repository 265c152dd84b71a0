"""BA, balanced aggregation: tokens are averaged separately in the positive and the negative rollouts of a group.

    L = (1/M) sum_g [ n+/G mean_{t in +} L_t + n-/G mean_{t in -} L_t ]

A token mean over the whole group couples sign with length (long wrong answers dominate the step); a mean of rollout
means makes a token of a long answer count less. The sign is that of the advantage. Secondary: public readings of the
paper agree on the formula, and no code is released. Ours: PPO's bounds and the unbiased group deviation.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AggregatePart, Scope, Scored
from swarm.objectives.parts import Clip, GroupZScore, TokenRatio, group_sum
from swarm.objectives.recipe import Recipe


class BalancedMean(AggregatePart):
    """Sum of the token means of a group's positive and negative rollouts, each weighted by its share of rollouts."""

    equation = "L = (1/M) sum_g sum_{s in +,-} (n_s/G) sum_{i in s} sum_t L_t / sum_{i in s} |o_i|"
    scope = Scope.GROUP

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        batch, sign = scored.batch, scored.advantages.sum(dim=1).sign()  # [N]
        size = group_sum(torch.ones_like(sign), batch.group_index)  # G, also those of neither sign
        total = losses.new_zeros(())
        for side in (1, -1):
            is_there = (sign == side).to(losses.dtype)
            tokens = group_sum(is_there * batch.length, batch.group_index).clamp(min=1)
            share = group_sum(is_there, batch.group_index) / size  # n_s / G
            total = total + (is_there * losses.sum(dim=1) * (share / tokens).to(losses.dtype)).sum()
        return total / max(1, batch.step_groups)


RECIPE = Recipe(
    name="ba",
    title="Balanced Aggregation: Understanding and Fixing Aggregation Bias in GRPO",
    acronym="BA",
    arxiv="2605.04077",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=BalancedMean(),
)
