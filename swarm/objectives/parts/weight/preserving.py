"""Clips that keep the gradient: a bounded token weighs as much as its bound instead of nothing.

Invariant: half-widths around 1 are in fields called low and high.
Shape letters: N rollouts, L longest response in tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.weight.clip import check_dual, clip_surrogate, dual_clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class PreservingClip(WeightPart):
    """PPO's clip in value; beyond a preserved bound the gradient is that of the bound times log pi.

    Source: "upper" AEPO, arXiv:2510.14545, `core_algos.py`; "both" GPPO, arXiv:2508.07629.
    """

    equation: ClassVar[str] = (
        "L_t = -min(r A, clip(r, (1-low) u, (1+high) u) A), u = r/sg[r] (at the upper bound only where so chosen); "
        "if dual and A < 0: min(L_t, -dual A)"
    )
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    preserve: Literal["both", "upper"] = "both"
    dual: float = 0.0  # 0 = off

    def __post_init__(self) -> None:
        if self.preserve not in ("both", "upper"):
            raise ConfigError(f"preserve: {self.preserve!r} is neither 'both' nor 'upper'")
        check_dual(self.dual)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FlippedClip(WeightPart):
    """Positive tokens weigh the inverse of their ratio, so that rare ones catch up instead of common ones.

    Tokens whose entropy is in the upper part of their response have wider bounds. Positives stop above their
    upper bound, negatives below their lower one; beyond `cap` a weight is held there and keeps its gradient.

    Source: ASPO, arXiv:2510.06062; zyh1999/ASPO `compute_policy_loss_archer`.
    """

    equation: ClassVar[str] = (
        "L_t = -A max(r, 1-low) if A < 0 else -A (m/sg[m]) / sg[m], m = min(r, 1+high); "
        "where the weight exceeds cap: -A cap log pi_t"
    )
    scope: ClassVar[Scope] = Scope.ROLLOUT
    low: float = 0.2  # half-widths
    high: float = 0.2
    wide_low: float = 0.4  # of tokens of high entropy
    wide_high: float = 0.4
    quantile: float = 0.8  # of a response's entropies, above which they are high
    cap: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise ConfigError(f"quantile {self.quantile} must be in [0, 1]")
        if self.cap <= 1:
            raise ConfigError(f"cap {self.cap} must exceed 1")

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio), scored.advantages
        entropy = torch.where(scored.mask, scored.entropy.detach(), math.nan)
        is_wide = entropy > torch.nanquantile(entropy, self.quantile, dim=1, keepdim=True)
        lowest = 1 - torch.where(is_wide, self.wide_low, torch.full_like(ratio, self.low))
        highest = 1 + torch.where(is_wide, self.wide_high, torch.full_like(ratio, self.high))
        risen, fallen = torch.minimum(ratio, highest), torch.maximum(ratio, lowest)
        flipped = risen / risen.detach() / risen.detach()
        weight = torch.where(advantages < 0, fallen, flipped)
        is_capped = weight > self.cap
        losses = -advantages * torch.where(is_capped, self.cap * scored.logprobs, weight)
        is_stopped = torch.where(advantages < 0, ratio < lowest, ratio > highest)
        return TokenLosses(losses=losses, bounded=is_stopped | is_capped)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreClip(WeightPart):
    """The ratio is held within far bounds before PPO's clip, so that no extreme one enters the loss.

    Source: StableReinforce, arXiv:2505.02835; yfzhang114/r1_reward `openrlhf/models/loss.py`.
    """

    equation: ClassVar[str] = "L_t = -min(q A, clip(q, 1-low, 1+high) A), q = clip(r, least, most)"
    least: float = 1e-3
    most: float = 1e3
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width

    def __post_init__(self) -> None:
        if not 0 < self.least < 1 < self.most:
            raise ConfigError(f"0 < least {self.least} < 1 < most {self.most} must hold")

    def __call__(self, scored: Scored) -> TokenLosses:
        held = scored.log_ratio.clamp(math.log(self.least), math.log(self.most))
        found = clip_surrogate(held, scored.advantages, 1 - self.low, 1 + self.high)
        return TokenLosses(losses=found.losses, bounded=found.bounded | (held != scored.log_ratio))
