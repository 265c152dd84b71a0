"""Budget groups (HBPO): one prompt is asked under several token budgets, and responses compete inside and across them.

    budget-aware rewards (4 cos, 1/Lmax a token over), inside a budget plus across; clip .2, token mean

The paper's formula with the constants of its code. The code differs in detail: it adds the inner comparison twice
and lowers a success that stays far below its budget. Ours: the bounds of the clip and the token mean.
"""

import math

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, allowed_length, group_scores, group_statistics
from swarm.objectives.recipe import Recipe


class BudgetGroups(AdvantagePart):
    """Budget-dependent rewards of successes, compared with members of the same budget and across the group.

    A success under a small budget earns more than one under a large budget, and overrunning the budget costs. The
    comparison inside a budget is the members' mean reward minus the reward of a success within the budget.
    """

    equation = (
        "A_i = (mean_{b} R - h(b)) + (R_i - mean_G R) / (std_G R + floor), h(x) = height cos(pi x / (2 Lmax)); "
        "R = h(max(|o|, b)) - cost max(|o| - b, 0) / Lmax for a success, else 0"
    )
    always_needs = frozenset({Requirement.BUDGETS, Requirement.ZERO_VARIANCE_GROUPS})
    height: NotNegative = 4.0
    cost: NotNegative = 1.0  # of overrunning by the whole limit
    correct: float = 0.5  # a success has a higher reward
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.budgets is not None, "the run does not supply budgets"
        length, budget = batch.length.to(torch.float64), batch.budgets.to(torch.float64)
        limit = allowed_length(batch).to(torch.float64)
        budget = torch.minimum(budget, limit)
        earned = self._worth(torch.maximum(length, budget) / limit) - self.cost * (length - budget).clamp(min=0) / limit
        rewards = torch.where(batch.rewards > self.correct, earned, torch.zeros_like(earned))
        across = group_scores(rewards, batch.group_index, self.floor)
        _, own = torch.unique(torch.stack([batch.group_index, batch.budgets]), dim=1, return_inverse=True)
        inside = group_statistics(rewards - self._worth(budget / limit), own).mean
        return (inside + across).to(batch.rewards.dtype)

    def _worth(self, share: Tensor) -> Tensor:
        return self.height * torch.cos(math.pi / 2 * share)


RECIPE = Recipe(
    name="hbpo",
    title="Hierarchical Budget Policy Optimization for Adaptive Reasoning",
    acronym="HBPO",
    arxiv="2507.15844",
    verification="paper",  # section 3; constants of ZJU-REAL/HBPO `math_reward.py` (4, and 1/4096 a token)
    advantage=BudgetGroups(height=4.0, cost=1.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
