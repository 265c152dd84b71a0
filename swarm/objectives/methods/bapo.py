"""BAPO as in its released code: clip bounds are raised each step until positives weigh as much as negatives.

    lower bound first, unweighted pos/neg against 1, dual clip 3, token mean

The paper's own order, measure and numbers are the recipe `bapo_paper`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from swarm.objectives.part import Positive, Requirement, Scope, Scored, TokenLosses, WeightPart, masked_sum
from swarm.objectives.parts import Dual, GroupZScore, TokenMean, TokenRatio, clip_surrogate
from swarm.objectives.recipe import Recipe


class BalancedClip(WeightPart):
    """A clip whose two bounds (of the ratio itself) are searched each step.

    The released code raises the lower bound first and compares unweighted sums of positives and negatives;
    the paper raises the upper bound first and compares a share, weighted by the sampling probability.
    """

    equation = "L_t = -min(r A, clip(r, c_low, c_high) A), bounds raised until positives reach target"
    scope = Scope.STEP
    form: Literal["code", "paper"] = "code"
    target: float = 1.0  # code: sum of positives / sum of negatives; paper: share of positives, in [0, 1]
    low_start: float = 0.6
    low_max: float = 0.8
    low_step: Positive = 0.05
    high_start: float = 1.2
    high_max: float = 2.0
    high_step: Positive = 0.05
    dual: Dual = 3.0  # 0 = off

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS}) if self.form == "paper" else frozenset()

    def __call__(self, scored: Scored) -> TokenLosses:
        low, high = self.bounds(scored)
        return clip_surrogate(scored.log_ratio, scored.advantages, low, high, self.dual)

    def bounds(self, scored: Scored) -> tuple[float, float]:
        """Returns the ratio bounds (low, high) at which positive tokens reach the target, else the last ones tried."""
        ratio, advantages = scored.log_ratio.detach().exp(), scored.advantages
        size = advantages.abs() * (scored.behavior.exp() if self.form == "paper" else 1.0)
        is_positive = advantages > 0

        def is_short(low: float, high: float) -> bool:
            kept = torch.where(is_positive, ratio.clamp(max=high), ratio.clamp(min=low)) * size
            positive = float(masked_sum(torch.where(is_positive, kept, 0.0), scored.mask))
            negative = float(masked_sum(torch.where(is_positive, 0.0, kept), scored.mask))
            if self.form == "code":
                return negative > 0 and positive / (negative + 1e-8) < self.target
            return positive + negative > 0 and positive / (positive + negative) < self.target

        return self._search_code(is_short) if self.form == "code" else self._search_paper(is_short)

    def _search_code(self, is_short: Callable[[float, float], bool]) -> tuple[float, float]:
        low, high = self.low_start, self.high_start
        while low < self.low_max and is_short(low, high):
            low = min(low + self.low_step, self.low_max)
        while high < self.high_max and is_short(low, high):
            high = min(high + self.high_step, self.high_max)
        return low, high

    def _search_paper(self, is_short: Callable[[float, float], bool]) -> tuple[float, float]:
        low, high = self.low_start, self.high_start
        rounding = 1e-9  # ten steps of 0.05 from 1.2 must still reach 1.7
        while low + self.low_step <= self.low_max + rounding and is_short(low, high):
            if high + self.high_step <= self.high_max + rounding:
                high += self.high_step
            else:
                low += self.low_step
        return low, high


RECIPE = Recipe(
    name="bapo",
    title="BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via "
    "Balanced Policy Optimization with Adaptive Clipping",
    acronym="BAPO",
    arxiv="2510.18927",
    verification="code",  # "code": WooooDyy/BAPO `recipe/bapo/policy_loss.py`; "paper": Algorithm 1
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BalancedClip(form="code"),
    aggregate=TokenMean(),
)

BAPO_PAPER = replace(
    RECIPE,
    name="bapo_paper",
    verification="paper",
    about="Balanced clip paper (BAPO, as its paper has it): the upper bound first, shares weighted by the sampling "
    "probability. Formula: upper bound first, share weighted by the sampling probability, target .4, token "
    "mean.",
    weight=BalancedClip(form="paper", target=0.4, low_max=0.9, low_step=0.02, high_max=3.0, dual=0.0),
)
