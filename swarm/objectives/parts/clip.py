"""Clipped surrogates: PPO's clip and dual clip, clips that keep a gradient, covariance clip, and the bare surrogate.

Invariant: `bounded` marks the tokens whose gradient the rule removed or capped.
Shape letters: N rollouts, L longest response in tokens.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import (
    Bound,
    PositiveShare,
    Scope,
    Scored,
    TokenLosses,
    WeightPart,
    masked_sum,
    on_mask,
    unbounded,
)


class Surrogate(WeightPart):
    """The plain importance-weighted surrogate; corrections are its only bound.

    Source: arXiv:1707.06347 eq. 6.
    """

    equation = "L_t = -r A"

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded(-torch.exp(scored.log_ratio) * scored.advantages)


Dual = Annotated[float, Bound(above=1, off=0)]
"""Constant of a dual clip: above 1, which is the ratio on policy; 0 is off."""


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
    """Caps the losses of tokens with A < 0 at -dual A, without gradient there; changes nothing if `dual` is 0."""
    if dual == 0:
        return found
    ceiling = -dual * advantages
    is_capped = (advantages < 0) & (found.losses > ceiling)
    return TokenLosses(losses=torch.where(is_capped, ceiling, found.losses), bounded=found.bounded | is_capped)


class Clip(WeightPart):
    """PPO's two-sided clip; separate half-widths give clip-higher, `dual` bounds the loss at negative advantages.

    Source: arXiv:1707.06347 eq. 7; arXiv:2503.14476 section 3.1; arXiv:1912.09729; verl
    `compute_policy_loss_vanilla` (dual 3; TRL has none).
    """

    equation = "L_t = -min(r A, clip(r, 1-low, 1+high) A); if dual and A < 0: min(L_t, -dual A)"
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    dual: Dual = 0.0  # 0 = off

    def __call__(self, scored: Scored) -> TokenLosses:
        return clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high, self.dual)


class PreservingClip(WeightPart):
    """PPO's clip that keeps a gradient: beyond a preserved bound, the gradient is that of the bound times log pi.

    Source: "upper" AEPO, arXiv:2510.14545, `core_algos.py`; "both" GPPO, arXiv:2508.07629.
    """

    equation = (
        "L_t = -min(r A, clip(r, (1-low) u, (1+high) u) A), u = r/sg[r] (at the upper bound only where so chosen); "
        "if dual and A < 0: min(L_t, -dual A)"
    )
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    preserve: Literal["both", "upper"] = "both"
    dual: Dual = 0.0  # 0 = off

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio), scored.advantages
        one = ratio / ratio.detach()
        floor = (1 - self.low) * (one if self.preserve == "both" else torch.ones_like(one))
        held = torch.where(
            ratio > 1 + self.high, (1 + self.high) * one, torch.where(ratio < 1 - self.low, floor, ratio)
        )
        plain, clipped = -ratio * advantages, -held * advantages
        bounded = clipped > plain
        found = TokenLosses(losses=torch.where(bounded, clipped, plain), bounded=bounded)
        return dual_clipped(found, advantages, self.dual)


def covariances(scored: Scored, among: Tensor | None = None) -> Tensor:
    """Covariance terms (A - mean A) (log pi - mean log pi), means over the tokens that count: float64 [N, L], detached.

    Args:
        scored: the whole step.
        among: bool [N, L], the trained tokens that count; None: all of them.
    """
    mask = scored.mask if among is None else among
    count = max(1, int(mask.sum()))
    advantages, logprobs = scored.advantages.double(), scored.logprobs.detach().double()
    centred = (values - masked_sum(values, mask) / count for values in (advantages, logprobs))
    return on_mask(next(centred) * next(centred), mask)


def largest(values: Tensor, eligible: Tensor, share: float, mask: Tensor) -> Tensor:
    """bool [N, L]: the eligible tokens of largest values, at most `share` of the tokens of `mask`, or one."""
    count = min(max(1, int(share * int(mask.sum()))), int(eligible.sum()))
    ranked = torch.where(eligible, values, torch.full_like(values, -torch.inf)).flatten()
    chosen = torch.zeros_like(eligible).flatten()
    chosen[ranked.argsort(descending=True, stable=True)[:count]] = True
    return chosen.reshape(mask.shape)


class CovarianceClip(WeightPart):
    """PPO's clip without a few tokens of high covariance.

    The published rule draws these tokens at random among those between the bounds. Ours takes the tokens of
    largest covariance, so that a run can be repeated.

    Source: Clip-Cov, arXiv:2505.22617; verl `clip_cov`; in SPEAR, arXiv:2509.22601.
    """

    equation = "L_t = 0 on the largest `share` of cov_t in (least, most), else -min(r A, clip(r, 1-low, 1+high) A)"
    scope = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    share: PositiveShare = 2e-4  # of the step's tokens, at least one
    least: float = 1.0
    most: float = 5.0

    def check(self) -> None:
        if self.least >= self.most:
            raise ConfigError(f"least: {self.least} is not below most: {self.most}")

    def __call__(self, scored: Scored) -> TokenLosses:
        found = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high)
        covariance = covariances(scored)
        eligible = (covariance > self.least) & (covariance < self.most) & scored.mask & ~found.bounded
        dropped = largest(covariance, eligible, self.share, scored.mask)
        losses = torch.where(dropped, torch.zeros_like(found.losses), found.losses)
        return TokenLosses(losses=losses, bounded=found.bounded | dropped)
