"""Clipped surrogates: gradient flows through the ratio, and stops where the ratio left its bounds.

Invariant: bounds are half-widths around 1 in fields called low and high. Gradient of a bounded token is
exactly 0 (or that of the cap), never a NaN.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart


def check_dual(dual: float) -> None:
    """Raises ConfigError for a dual clip that is neither off nor above 1, the ratio where nothing moved."""
    if dual != 0 and dual <= 1:
        raise ConfigError(f"dual: {dual} is neither 0 (off) nor above 1")


def clip_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor, dual: float = 0.0
) -> TokenLosses:
    """-min(r A, clip(r, low, high) A); with `dual` > 1 at most -dual A where A < 0.

    Args:
        log_ratio: [N, L], gradient flows.
        advantages: [N, L], constant.
        low: lower bound of the ratio itself, a number or [N, L].
        high: upper bound of the ratio itself.
        dual: dual-clip constant; 0 is off.

    Source: arXiv:1707.06347 eq. 7; separate bounds arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    ratio = torch.exp(log_ratio)
    bounds = (torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device) for bound in (low, high))
    plain, clipped = -ratio * advantages, -torch.clamp(ratio, *bounds) * advantages
    found = TokenLosses(losses=torch.maximum(plain, clipped), bounded=clipped > plain)
    return dual_clipped(found, advantages, dual)


def dual_clipped(found: TokenLosses, advantages: Tensor, dual: float) -> TokenLosses:
    """Losses of tokens with A < 0 held at -dual A, without gradient there; unchanged where `dual` is 0."""
    if dual == 0:
        return found
    ceiling = -dual * advantages
    is_capped = (advantages < 0) & (found.losses > ceiling)
    return TokenLosses(losses=torch.where(is_capped, ceiling, found.losses), bounded=found.bounded | is_capped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip(WeightPart):
    """PPO's two-sided clip; separate half-widths give clip-higher, `dual` bounds negatives far off policy.

    Source: arXiv:1707.06347 eq. 7; arXiv:2503.14476 section 3.1; arXiv:1912.09729; verl
    `compute_policy_loss_vanilla` (dual 3; TRL has none).
    """

    equation: ClassVar[str] = "L_t = -min(r A, clip(r, 1-low, 1+high) A); if dual and A < 0: min(L_t, -dual A)"
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    dual: float = 0.0  # 0 = off

    def __post_init__(self) -> None:
        check_dual(self.dual)

    def __call__(self, scored: Scored) -> TokenLosses:
        return clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high, self.dual)
