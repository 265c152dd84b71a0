"""VESPO: the whole response's ratio through a gamma-shaped weight that needs no clip.

    token mean of -sg[w^k exp(lambda (1 - w))] A log pi, w the product; k, lambda 2, 3 or (A < 0) 3, 2

Far from 1 on either side the weight vanishes smoothly: negatives vanish faster towards 0, positives towards large
ratios. The ratio is to the generator, so that it covers staleness and mismatch.
"""

import math

import torch

from swarm.objectives.part import Positive, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import FullSequenceRatio, GroupZScore, TokenMean
from swarm.objectives.recipe import Recipe

LOG_FLOOR = math.log(1e-8)
"""Least log-ratio, as in TRL."""


class GammaWeight(WeightPart):
    """The shape of a gamma density in the recipe's ratio, with its peak at power / rate."""

    equation = "L_t = -sg[w^power exp(rate (1 - w))] A log pi_t, w = r; (power, rate) by the sign of A"
    positive_power: Positive = 2.0  # where A >= 0
    positive_rate: Positive = 3.0
    negative_power: Positive = 3.0
    negative_rate: Positive = 2.0

    def __call__(self, scored: Scored) -> TokenLosses:
        log_weight = scored.log_ratio.detach().clamp(min=LOG_FLOOR)
        is_positive = scored.advantages >= 0
        power = torch.where(is_positive, self.positive_power, torch.full_like(log_weight, self.negative_power))
        rate = torch.where(is_positive, self.positive_rate, torch.full_like(log_weight, self.negative_rate))
        weight = torch.exp(power * log_weight - rate * torch.expm1(log_weight))
        return unbounded(-weight * scored.advantages * scored.logprobs)


RECIPE = Recipe(
    name="vespo",
    title="VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training",
    acronym="VESPO",
    arxiv="2602.10693",
    verification="code",  # TRL `get_gamma_weights`
    advantage=GroupZScore(),
    ratio=FullSequenceRatio(),
    weight=GammaWeight(),
    aggregate=TokenMean(),
)
