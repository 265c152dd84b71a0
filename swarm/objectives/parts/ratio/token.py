"""Importance ratios of single tokens.

Invariant: off the mask a log-ratio is exactly 0, on it bounded by +-20 so that exp stays finite.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Part, RatioPart, Requirement, Scored

LOG_RATIO_BOUND = 20.0

Against = Literal["behavior", "proximal"]
"""The denominator: the policy that sampled (mu), or the one at the start of the update (pi_old)."""


def log_ratio(logprobs: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log pi(token) - log of the denominator's probability: [N, L] in [-20, 20], 0 off the mask."""
    difference = torch.where(mask, logprobs - denominator, torch.zeros_like(logprobs))
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstPolicy(Part):
    """Base of parts whose ratio has a denominator to choose; what it needs follows from the choice."""

    against: Against = "behavior"

    def __post_init__(self) -> None:
        if self.against not in ("behavior", "proximal"):
            raise ConfigError(f"against: {self.against!r} is neither 'behavior' nor 'proximal'")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset(
            {Requirement.BEHAVIOR_LOGPROBS if self.against == "behavior" else Requirement.PROXIMAL_LOGPROBS}
        )

    def denominator(self, scored: Scored) -> Tensor:
        """Log-probs [N, L] of the chosen policy."""
        return scored.behavior if self.against == "behavior" else scored.proximal


@dataclass(frozen=True, kw_only=True, slots=True)
class NoRatio(RatioPart):
    """The ratio of a policy to itself: 0 in value, with the gradient of log pi.

    What REINFORCE uses, and swarm sampling: rollouts of others are encoded as if generated here.

    Source: arXiv:2509.08721 (swarm sampling).
    """

    equation: ClassVar[str] = "r = pi / sg[pi] (value 1)"

    def __call__(self, scored: Scored) -> Tensor:
        return log_ratio(scored.logprobs, scored.logprobs.detach(), scored.mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRatio(AgainstPolicy, RatioPart):
    """The ratio of one token.

    Source: arXiv:1707.06347 section 3; the bound as in verl `core_algos.py`.
    """

    equation: ClassVar[str] = "r_t = exp(clamp(log pi_t - log mu_t, -20, 20))"

    def __call__(self, scored: Scored) -> Tensor:
        return log_ratio(scored.logprobs, self.denominator(scored), scored.mask)
