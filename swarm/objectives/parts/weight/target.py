"""Regressions: the policy is pulled to where an optimal one would be, instead of pushed along a surrogate.

Invariant: targets are constants.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.groups import group_median, group_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedRatio(WeightPart):
    """The ratio's distance from the optimum of a bounded-ratio problem, times the size of the advantage.

    The target looks at the group's median, the weight at whatever advantage the recipe has. Of an even
    group the median is the mean of the middle two (ours).

    Source: GBPO, arXiv:2604.18578; `bounded_ratio_rl` `core_algos.py`.
    """

    equation: ClassVar[str] = (
        "L_t = |(r - tgt) A|, tgt = 1-low + (low+high) sigmoid((R - median_G) / (std_G + floor) / temperature)"
    )
    scope: ClassVar[Scope] = Scope.GROUP
    low: float = 0.2  # half-widths
    high: float = 0.2
    temperature: float = 1e-4
    floor: float = 1e-6

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.floor <= 0:
            raise ConfigError("temperature and floor must be positive")

    def targets(self, batch: Batch) -> Tensor:
        """Ratio [N] that each rollout's tokens are pulled to, float64."""
        group = group_statistics(batch.rewards, batch.group_index)
        lead = batch.rewards.to(group.mean.dtype) - group_median(batch.rewards, batch.group_index)
        share = torch.sigmoid(lead / (group.std + self.floor) / self.temperature)
        return 1 - self.low + (self.low + self.high) * share

    def __call__(self, scored: Scored) -> TokenLosses:
        targets = self.targets(scored.batch).to(scored.logprobs.dtype)[:, None]
        losses = ((torch.exp(scored.log_ratio) - targets) * scored.advantages).abs()
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRegression(WeightPart):
    """Squared distance of a rollout's scaled log-ratio from its advantage.

    Wants a token ratio, which it adds up. Every token carries the rollout's value: take the mean over
    rollouts.

    Source: Kimi k1.5, arXiv:2501.12599 section 2.3.2 (ROLL `kimi15`); A*-PO, arXiv:2505.20686.
    """

    equation: ClassVar[str] = "L_i = (scale sum_t log r_t - A)^2"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    scale: float = 0.1

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ConfigError(f"scale {self.scale} must be positive")

    def __call__(self, scored: Scored) -> TokenLosses:
        moved = torch.where(scored.mask, scored.log_ratio, torch.zeros_like(scored.log_ratio)).sum(dim=1, keepdim=True)
        losses = (self.scale * moved - scored.advantages) ** 2
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))
