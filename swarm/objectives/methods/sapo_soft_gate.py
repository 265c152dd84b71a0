"""Soft Adaptive Policy Optimization (the SAPO of Qwen): a smooth gate of the ratio in place of the clip.

    rollout mean of -f(r) A, f(r) = sigmoid(tau (r - 1)) 4 / tau; tau 1 for A > 0, else 1.05

Negative tokens decay faster. Not the SAPO that shares rollouts in a swarm; that is `sapo_swarm`.
"""

import torch

from swarm.objectives.part import Positive, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.recipe import Recipe


class SoftGate(WeightPart):
    """A sigmoid of the ratio in place of the clip, steeper where the advantage is not positive."""

    equation = "L_t = -(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A"
    positive: Positive = 1.0  # tau where A > 0
    negative: Positive = 1.05  # tau elsewhere

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio = torch.exp(scored.log_ratio)
        steepness = torch.where(scored.advantages > 0, self.positive, torch.full_like(ratio, self.negative))
        return unbounded(-torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness * scored.advantages)


RECIPE = Recipe(
    name="sapo_soft_gate",
    title="Soft Adaptive Policy Optimization",
    acronym="SAPO (soft)",
    arxiv="2511.20347",
    verification="code",  # verl `sapo`; TRL `sapo`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=SoftGate(),
    aggregate=RolloutMean(),
)
