"""GMPO: the geometric mean of a rollout's token ratios in place of the arithmetic one.

Each log-ratio is clipped on the side that the advantage pushes to before it enters the mean.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.advantage import GroupZScore
from swarm.objectives.parts.aggregate import RolloutMean
from swarm.objectives.parts.ratio import TokenRatio
from swarm.objectives.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class GeometricMean(WeightPart):
    """Token log-ratios, each clipped on the side its advantage pushes to, averaged before exp.

    Wants a token ratio, advantages equal over a rollout, and the mean over rollouts.

    Source: GMPO, arXiv:2507.20673; callsys/GMPO; verl `geo_mean`.
    """

    equation: ClassVar[str] = "L_i = -A exp(mean_t sgn(A) min(sgn(A) d_t, sgn(A) clip(d_t, -low, high)))"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    low: float = 0.4  # of the log-ratio
    high: float = 0.4

    def __post_init__(self) -> None:
        if min(self.low, self.high) < 0:
            raise ConfigError("low and high must not be negative")

    def __call__(self, scored: Scored) -> TokenLosses:
        plain, advantages, mask = scored.log_ratio, scored.advantages, scored.mask
        held = torch.where(advantages >= 0, plain.clamp(max=self.high), plain.clamp(min=-self.low))
        total = torch.where(mask, held, torch.zeros_like(held)).sum(dim=1, keepdim=True)
        mean = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return TokenLosses(losses=-advantages * torch.exp(mean), bounded=held != plain)


RECIPE = Recipe(
    name="gmpo",
    title="Geometric-Mean Policy Optimization",
    acronym="GMPO",
    arxiv="2507.20673",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=GeometricMean(),
    aggregate=RolloutMean(),
)
