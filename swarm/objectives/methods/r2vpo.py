"""R2VPO, token level: a penalty on the variance of the ratio in place of a clip.

    token mean of -(r A - lambda (r-1)^2), at the lambda before the first step

The unclipped primal and the price of 0.04 are known from two reproductions. The paper's bound on the variance, its
dual update and its reweighting of stale samples are not known to us. Ours: bound 0.04, a multiplicative
update of the price after every step (see the part), no reweighting, token mean.
"""

import math
from dataclasses import replace

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Memory, NotNegative, Positive, Scored, TokenLosses, WeightPart, masked_sum, unbounded
from swarm.objectives.parts import GroupZScore, RolloutMean, SequenceRatio, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class RatioVariance(WeightPart):
    """The unclipped surrogate, with a penalty of `price` times (r - 1)^2.

    The paper's update of the price and its bound on the variance are not known to us. Ours: after each step
    the price is multiplied by exp(rate * clip(measured / bound - 1, -1, 1)) and held in [least, most], so
    that it settles where the variance meets the bound. `rate` 0 keeps the price at `start`.
    """

    equation = "L_t = -(r A - price (r - 1)^2); after a step price <- price exp(rate clip(var/bound-1))"
    start: float = 0.04  # price before the first step
    bound: Positive = 0.04  # on mean (r - 1)^2: the square of the usual clip half-width; ours
    rate: NotNegative = 0.1  # ours
    least: Positive = 1e-3  # ours
    most: float = 10.0  # ours

    def check(self) -> None:
        if not self.least <= self.start <= self.most:
            raise ConfigError(f"start: {self.start} does not lie in [least {self.least}, most {self.most}]")

    def initial(self) -> Memory:
        return {"price": self.start}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        squares = (torch.exp(scored.log_ratio.detach().double()) - 1) ** 2
        variance = float(masked_sum(squares, scored.mask)) / max(1, int(scored.mask.sum()))
        excess = max(-1.0, min(1.0, variance / self.bound - 1))
        price = float(memory["price"]) * math.exp(self.rate * excess)
        return {"price": max(self.least, min(self.most, price))}

    def __call__(self, scored: Scored) -> TokenLosses:
        price = float(self.remembered(scored.batch)["price"])
        ratio = torch.exp(scored.log_ratio)
        return unbounded(-(ratio * scored.advantages - price * (ratio - 1) ** 2))


RECIPE = Recipe(
    name="r2vpo",
    title="Ratio-Variance Regularized Policy Optimization for Efficient LLM Fine-tuning",
    acronym="R2VPO",
    arxiv="2601.03320",
    verification="secondary",  # unclipped primal; two third-party implementations agree, both at 0.04
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=RatioVariance(),
    aggregate=TokenMean(),
)

R2VPO_SEQUENCE = replace(
    RECIPE,
    name="r2vpo_sequence",
    about="Ratio variance sequence (R2VPO, sequence level): the variance of the length-normalised ratio of a "
    "response is priced instead of clipped. As `r2vpo`, for one ratio a response; a second reproduction has "
    "it so. Ours: the length normalisation, the bound and the update of the price. Formula: (1/N) sum_i of "
    "-(s A - lambda (s-1)^2), s the length-normalised ratio, at a remembered lambda.",
    ratio=SequenceRatio(),
    aggregate=RolloutMean(),
)
