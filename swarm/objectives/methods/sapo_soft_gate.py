"""Soft Adaptive Policy Optimization (the SAPO of Qwen): a smooth gate of the ratio in place of the clip.

    rollout mean of -f(r) A, f(r) = sigmoid(tau (r - 1)) 4 / tau; tau 1 for A > 0, else 1.05

Negative tokens decay faster. Not the SAPO that shares rollouts in a swarm; that is `sapo_swarm`.
"""

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.recipe import Recipe


class SoftGate(WeightPart):
    """A sigmoid of the ratio in place of the clip, steeper where the advantage is not positive.

    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347; verl `sapo`; TRL `sapo`.
    """

    equation = "L_t = -(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A"
    positive: float = 1.0  # tau where A > 0
    negative: float = 1.05  # tau elsewhere

    def __post_init__(self) -> None:
        if min(self.positive, self.negative) <= 0:
            raise ConfigError("positive and negative (the temperatures) must exceed 0")

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio = torch.exp(scored.log_ratio)
        steepness = torch.where(scored.advantages > 0, self.positive, torch.full_like(ratio, self.negative))
        losses = -torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness * scored.advantages
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


RECIPE = Recipe(
    name="sapo_soft_gate",
    title="Soft Adaptive Policy Optimization",
    acronym="SAPO (soft)",
    arxiv="2511.20347",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=SoftGate(),
    aggregate=RolloutMean(),
)
