"""Clip bounds of their own for every token: by how likely the token was, or how uncertain the policy is there.

Invariant: bounds are constants; no gradient flows through entropy or probability.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Requirement, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.weight.clip import check_dual, clip_surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityClip(WeightPart):
    """The rarer a token was when sampled, the wider its bounds. Wants a ratio to the generator.

    Source: DCPO (dynamic clipping), arXiv:2509.02333; lime-RL/DCPO `get_clip_low_high`.
    """

    equation: ClassVar[str] = (
        "L_t = min(-min(r A, clip(r, lo, hi) A), -ceiling A if A < 0), mu = mu(token): "
        "lo = (1 + sqrt(max(1 - 4 low/mu, 0)))/2, hi = min((1 + sqrt(1 + 4 high/mu))/2, ceiling)"
    )
    low: float = 0.16
    high: float = 0.2
    ceiling: float = 10.0  # of the ratio; also the dual clip

    def __post_init__(self) -> None:
        if min(self.low, self.high) < 0 or self.ceiling <= 1:
            raise ConfigError("low and high must not be negative and ceiling must exceed 1")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS})

    def __call__(self, scored: Scored) -> TokenLosses:
        rarity = torch.exp(-scored.behavior)
        lowest = (1 + (1 - 4 * self.low * rarity).clamp(min=0).sqrt()) / 2
        highest = ((1 + (1 + 4 * self.high * rarity).sqrt()) / 2).clamp(max=self.ceiling)
        return clip_surrogate(scored.log_ratio, scored.advantages, lowest, highest, self.ceiling)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyClip(WeightPart):
    """Uncertain tokens may rise further, certain ones fall further, and their advantages shift along.

    Entropy is placed in [-1, 1] by its log: 0 at the pivot quantile, 1 at the most and -1 at the least
    uncertain token of the step. The released code divides the negative side by its (negative) minimum, which
    turns its sign; here it is divided by the size of the minimum, as the sign tests around it assume.

    Source: HAPO (heterogeneous adaptive), starriver030515/HAPO `core_algos.py`.
    """

    equation: ClassVar[str] = (
        "lo = low (1 - min(h, 0)), hi = high (1 + max(h, 0)); A <- A (1 + h) where h > 0 and r is outside "
        "(1-lo/2, 1+hi/2), or h <= 0 and r is inside; L_t = -min(r A, clip(r, 1-lo, 1+hi) A), dual clip where A < 0"
    )
    scope: ClassVar[Scope] = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    pivot: float = 0.8  # quantile of the entropies that counts as 0
    dual: float = 10.0  # 0 = off

    def __post_init__(self) -> None:
        if not 0 <= self.pivot <= 1:
            raise ConfigError(f"pivot {self.pivot} must be in [0, 1]")
        check_dual(self.dual)

    def __call__(self, scored: Scored) -> TokenLosses:
        place = self.places(scored.entropy.detach(), scored.mask)
        low, high = self.low * (1 - place.clamp(max=0)), self.high * (1 + place.clamp(min=0))
        ratio = torch.exp(scored.log_ratio.detach())
        is_inside = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
        shifts = torch.where(place > 0, ~is_inside, is_inside)
        advantages = torch.where(shifts, scored.advantages * (1 + place), scored.advantages)
        return clip_surrogate(scored.log_ratio, advantages, 1 - low, 1 + high, self.dual)

    def places(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """Where each token's entropy lies in the step: [N, L] in [-1, 1], 0 off the mask.

        Args:
            entropy: [N, L] nats, constant.
            mask: bool [N, L]; at least one token.
        """
        logs = torch.where(mask, entropy, torch.ones_like(entropy)).clamp(min=1e-8).log()
        known = logs[mask].sort().values
        lead = torch.where(mask, logs - known[round(self.pivot * (known.numel() - 1))], torch.zeros_like(logs))
        return torch.where(lead > 0, lead / lead.max().clamp(min=1e-8), lead / lead.min().abs().clamp(min=1e-8))
