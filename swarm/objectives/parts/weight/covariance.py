"""Clips by covariance: the few tokens whose likelihood and advantage rise together cost most entropy.

Invariant: covariances are of the whole step, and the same step always chooses the same tokens.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart, masked_sum
from swarm.objectives.parts.weight.clip import clip_surrogate


def covariances(scored: Scored) -> Tensor:
    """(A - mean A) (log pi - mean log pi), means over the step's trained tokens: float64 [N, L], detached."""
    count = max(1, int(scored.mask.sum()))
    advantages, logprobs = scored.advantages.double(), scored.logprobs.detach().double()
    centred = (values - masked_sum(values, scored.mask) / count for values in (advantages, logprobs))
    product = next(centred) * next(centred)
    return torch.where(scored.mask, product, torch.zeros_like(product))


def largest(values: Tensor, eligible: Tensor, share: float, mask: Tensor) -> Tensor:
    """bool [N, L]: the `share` of the step's tokens (at least one) with the largest values, of the eligible."""
    count = min(max(1, int(share * int(mask.sum()))), int(eligible.sum()))
    ranked = torch.where(eligible, values, torch.full_like(values, -torch.inf)).flatten()
    chosen = torch.zeros_like(eligible).flatten()
    chosen[ranked.argsort(descending=True, stable=True)[:count]] = True
    return chosen.reshape(mask.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class CovarianceClip(WeightPart):
    """PPO's clip, and a few tokens of high covariance are left out.

    The published rule draws those tokens at random from all between the bounds. Ours: the ones of largest
    covariance, so that a run can be repeated.

    Source: Clip-Cov, arXiv:2505.22617; verl `clip_cov`; in SPEAR, arXiv:2509.22601.
    """

    equation: ClassVar[str] = (
        "L_t = 0 on the largest `share` of cov_t in (least, most), else -min(r A, clip(r, 1-low, 1+high) A)"
    )
    scope: ClassVar[Scope] = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    share: float = 2e-4  # of the step's tokens, at least one
    least: float = 1.0
    most: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.least >= self.most:
            raise ConfigError("share must be in (0, 1], and least below most")

    def __call__(self, scored: Scored) -> TokenLosses:
        found = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high)
        covariance = covariances(scored)
        eligible = (covariance > self.least) & (covariance < self.most) & scored.mask & ~found.bounded
        dropped = largest(covariance, eligible, self.share, scored.mask)
        losses = torch.where(dropped, torch.zeros_like(found.losses), found.losses)
        return TokenLosses(losses=losses, bounded=found.bounded | dropped)


@dataclass(frozen=True, kw_only=True, slots=True)
class CovariancePenalty(WeightPart):
    """The plain surrogate, and the few tokens of highest covariance pay for leaving the old policy.

    Source: KL-Cov, arXiv:2505.22617; verl `kl_cov`.
    """

    equation: ClassVar[str] = "L_t = -r A + strength |log r| on the largest `share` of cov_t, else -r A"
    scope: ClassVar[Scope] = Scope.STEP
    share: float = 2e-4  # of the step's tokens, at least one
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("share must be in (0, 1]")

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -torch.exp(scored.log_ratio) * scored.advantages
        chosen = largest(covariances(scored), scored.mask, self.share, scored.mask)
        penalty = self.strength * scored.log_ratio.abs()
        return TokenLosses(losses=torch.where(chosen, losses + penalty, losses), bounded=chosen)
