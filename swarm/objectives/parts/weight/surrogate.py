"""Surrogates without PPO's clip around 1: unbounded, bounded on one side, or bounded around another centre.

Invariant: fields named cap are bounds of the ratio itself, fields named width are half-widths.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Requirement, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.ratio.token import log_ratio
from swarm.objectives.parts.weight.clip import clip_surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate(WeightPart):
    """The plain importance-weighted surrogate; corrections are its only bound.

    Source: arXiv:1707.06347 eq. 6.
    """

    equation: ClassVar[str] = "L_t = -r A"

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -torch.exp(scored.log_ratio) * scored.advantages
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedRatio(WeightPart):
    """The whole ratio as a constant weight of the log-likelihood: the gradient of `Surrogate`, another value.

    Source: MiniRL, arXiv:2512.01374.
    """

    equation: ClassVar[str] = "L_t = -sg[r] A log pi_t"

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -torch.exp(scored.log_ratio.detach()) * scored.advantages * scored.logprobs
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSidedTruncation(WeightPart):
    """The surrogate with the ratio cut from above, whatever the sign of the advantage; no gradient over the cap.

    Source: AIPO, arXiv:2505.24034.
    """

    equation: ClassVar[str] = "L_t = -min(r, cap) A"
    cap: float = 4.0

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ConfigError(f"cap: {self.cap} is below the ratio 1")

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio = torch.exp(scored.log_ratio)
        return TokenLosses(losses=-ratio.clamp(max=self.cap) * scored.advantages, bounded=ratio > self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricClip(WeightPart):
    """PPO's clip with bounds that are each other's inverse, symmetric in the log-ratio.

    Source: LOOP, arXiv:2502.01600; apple/ml-loop.
    """

    equation: ClassVar[str] = "L_t = -min(r A, clip(r, 1/(1+width), 1+width) A)"
    width: float = 0.1  # half-width of the upper side

    def __post_init__(self) -> None:
        if self.width <= 0:
            raise ConfigError(f"width: {self.width} must be positive")

    def __call__(self, scored: Scored) -> TokenLosses:
        return clip_surrogate(scored.log_ratio, scored.advantages, 1 / (1 + self.width), 1 + self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class CentredClip(WeightPart):
    """A clip of pi/mu centred on pi_old/mu: the trust region lies around the policy that is updated, not the data's.

    Wants the ratio against the behaviour policy.

    Source: Mix-PPG of ReMix, arXiv:2507.06892.
    """

    equation: ClassVar[str] = "L_t = -min(r A, clip(r, rho - width, rho + width) A), r = pi/mu, rho = sg[pi_old/mu]"
    width: float = 0.2  # half-width

    def __post_init__(self) -> None:
        if self.width <= 0:
            raise ConfigError(f"width: {self.width} must be positive")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS, Requirement.PROXIMAL_LOGPROBS})

    def __call__(self, scored: Scored) -> TokenLosses:
        centre = log_ratio(scored.proximal, scored.behavior, scored.mask).exp()
        return clip_surrogate(scored.log_ratio, scored.advantages, centre - self.width, centre + self.width)
