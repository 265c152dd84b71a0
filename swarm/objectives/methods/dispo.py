"""Four bounds (DISPO): the ratio as a constant weight of REINFORCE, with separate bounds for right and wrong rollouts.

    token mean of -sg[clip(r, .8, 11)] A log pi for A > 0, clip(r, 0, 101) for A < 0

The bounds are the paper's. Not in the recipe: the filter of uniform groups, which is the sampler's work, the penalty
on overlong answers (the reward part `Overlong`), and the learning rate.
"""

import torch

from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, TokenMean, TokenRatio, weighted_likelihood
from swarm.objectives.recipe import Recipe


class FourBounds(WeightPart):
    """The clipped ratio as a constant weight, with separate bounds for each sign of the advantage."""

    equation = "L_t = -sg[clip(r, 1-low, 1+high)] A log pi_t, (low, high) by the sign of A"
    positive_low: float = 0.2  # half-widths
    positive_high: float = 10.0
    negative_low: float = 1.0  # 1 = no lower bound
    negative_high: float = 100.0

    def __call__(self, scored: Scored) -> TokenLosses:
        is_positive = scored.advantages > 0
        bounds = torch.tensor(
            [[self.negative_low, self.negative_high], [self.positive_low, self.positive_high]],
            dtype=scored.log_ratio.dtype,
            device=scored.log_ratio.device,
        )[is_positive.long()]
        return weighted_likelihood(scored, scored.log_ratio, 1 - bounds[..., 0], 1 + bounds[..., 1])


RECIPE = Recipe(
    name="dispo",
    title="DISPO: Enhancing Training Efficiency and Stability in Reinforcement Learning for "
    "Large Language Model Mathematical Reasoning",
    acronym="DISPO",
    arxiv="2602.00983",
    verification="secondary",  # two secondary sources agree
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=FourBounds(),
    aggregate=TokenMean(),
)
