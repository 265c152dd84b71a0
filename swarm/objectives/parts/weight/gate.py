"""Gates: the ratio or the advantage decides which tokens count, and how much, without a surrogate to be cut off.

Invariant: half-widths around 1 are in fields called low and high; REINFORCE gates are constants.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftGate(WeightPart):
    """A sigmoid of the ratio in place of the clip, steeper where the advantage is not positive.

    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347; verl `sapo`; TRL `sapo`.
    """

    equation: ClassVar[str] = "L_t = -(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSidedGate(WeightPart):
    """REINFORCE of tokens that have not moved beyond a bound on the side their advantage pushes to.

    Source: REC-OneSide-NoIS, arXiv:2509.24203; Trinity-RFT `rec`.
    """

    equation: ClassVar[str] = "L_t = -M A log pi_t, M = 1[A >= 0, r <= 1+high] or 1[A <= 0, r >= 1-low]"
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio.detach()), scored.advantages
        rises = (advantages >= 0) & (ratio <= 1 + self.high)
        falls = (advantages <= 0) & (ratio >= 1 - self.low)
        return _gated(scored, rises | falls)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSidedGate(WeightPart):
    """REINFORCE of tokens whose ratio lies within two bounds.

    Source: REC-TwoSide-NoIS, arXiv:2509.24203; Trinity-RFT `rec`.
    """

    equation: ClassVar[str] = "L_t = -1[1-low <= r <= 1+high] A log pi_t"
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio = torch.exp(scored.log_ratio.detach())
        return _gated(scored, (ratio >= 1 - self.low) & (ratio <= 1 + self.high))


@dataclass(frozen=True, kw_only=True, slots=True)
class RingGate(WeightPart):
    """REINFORCE of tokens within two bounds, or far beyond the bound their advantage pushes away from.

    Source: REC-Ring-NoIS, arXiv:2509.24203; Trinity-RFT `rec`.
    """

    equation: ClassVar[str] = (
        "L_t = -M A log pi_t, M = 1[1-low <= r <= 1+high] or 1[A >= 0, r <= 1-far_low] or 1[A <= 0, r >= 1+far_high]"
    )
    low: float = 0.2  # half-widths
    high: float = 0.2
    far_low: float = 0.6
    far_high: float = 2.0

    def __post_init__(self) -> None:
        if self.far_low < self.low or self.far_high < self.high:
            raise ConfigError("far_low and far_high must not be inside low and high")

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio.detach()), scored.advantages
        is_near = (ratio >= 1 - self.low) & (ratio <= 1 + self.high)
        rises = (advantages >= 0) & (ratio <= 1 - self.far_low)
        falls = (advantages <= 0) & (ratio >= 1 + self.far_high)
        return _gated(scored, is_near | rises | falls)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialWeight(WeightPart):
    """REINFORCE with an exponential of the advantage as a further weight: the best rollouts count most.

    Source: RED-Weight, arXiv:2509.24203; Trinity-RFT `rec` with weight "advantage".
    """

    equation: ClassVar[str] = "L_t = -exp(A / temperature) A log pi_t"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature} must be positive")

    def __call__(self, scored: Scored) -> TokenLosses:
        exponent = (scored.advantages / self.temperature).clamp(max=20.0)
        losses = -torch.exp(exponent) * scored.advantages * scored.logprobs
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


def _gated(scored: Scored, is_open: Tensor) -> TokenLosses:
    likelihood = -scored.advantages * scored.logprobs
    return TokenLosses(losses=torch.where(is_open, likelihood, torch.zeros_like(likelihood)), bounded=~is_open)
