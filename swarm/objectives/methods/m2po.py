"""M2PO: the widest clip at which the mean square log-ratio of harmful tokens is at most 0.04.

    harmful mean of min(d^2, tau^2) at most .04, tau one of the data, token mean

Made for data that is many updates old; the interval is never tighter than [0.7, 1.5]. There is no dual clip.
"""

import math

import torch
from torch import Tensor

from swarm.objectives.part import Positive, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, TokenMean, TokenRatio, clip_surrogate
from swarm.objectives.recipe import Recipe


def widest_cap(squares: Tensor, budget: float) -> float:
    """Returns the largest of `squares` that, as a cap on all of them, makes their mean at most `budget`.

    Args:
        squares: [K], any order.
        budget: bound on mean(min(squares, cap)).

    Returns:
        The cap; infinity if the mean is at most `budget` without one, 0 if even the smallest square is too large a cap.
    """
    if squares.numel() == 0 or float(squares.mean()) <= budget:
        return math.inf
    ascending = squares.to(torch.float64).sort().values
    above = torch.arange(ascending.numel() - 1, -1, -1, dtype=torch.float64, device=squares.device)
    means = (ascending.cumsum(dim=0) + above * ascending) / ascending.numel()  # with the k-th as the cap; ascends
    num_within = int((means <= budget).sum())
    return float(ascending[num_within - 1]) if num_within else 0.0


class SecondMomentClip(WeightPart):
    """A clip at exp(+-tau), with the widest tau at which the mean squared log-ratio of harmful tokens is in budget.

    Harmful tokens are those on which PPO's clip can act: A > 0 with r > 1, or A < 0 with r < 1. If their mean square
    is within the budget, nothing is clipped. The bounds are never tighter than [1 - low, 1 + high].
    """

    equation = (
        "L_t = -min(r A, clip(r, min(e^-tau, 1-low), max(e^tau, 1+high)) A), mean_harmful(min(d^2, tau^2)) <= budget"
    )
    scope = Scope.STEP
    budget: Positive = 0.04
    low: float = 0.3  # least half-width
    high: float = 0.5  # least half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        low, high = self.bounds(scored)
        return clip_surrogate(scored.log_ratio, scored.advantages, low, high)

    def bounds(self, scored: Scored) -> tuple[float, float]:
        """Returns the bounds (low, high) of the ratio itself for the whole step."""
        ratios, advantages = scored.log_ratio.detach(), scored.advantages
        is_harmful = scored.mask & (ratios * advantages > 0)
        tau = math.sqrt(widest_cap(ratios[is_harmful] ** 2, self.budget))
        return min(math.exp(-tau), 1 - self.low), max(math.exp(tau), 1 + self.high)


RECIPE = Recipe(
    name="m2po",
    title="Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
    acronym="M2PO",
    arxiv="2510.01161",
    verification="code",  # Infini-AI-Lab/M2PO `compute_m2po_policy_loss` (tau is one of the data's own log-ratios)
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=SecondMomentClip(budget=0.04, low=0.3, high=0.5),
    aggregate=TokenMean(),
)
