"""Corrections for the gap between the generator (mu) and the policy at the start of the update (pi_old).

Invariant: rho = pi_old / mu carries no gradient. With one update a batch pi_old is the policy itself, so rho
is the whole ratio pi / mu as a constant. Rejected tokens stay in the denominators of the loss.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import CorrectionPart, Requirement, Scope, Scored
from swarm.objectives.parts.ratio.sequence import rollout_sum
from swarm.objectives.parts.ratio.token import LOG_RATIO_BOUND, log_ratio


def log_mismatch(scored: Scored) -> Tensor:
    """log rho of each token: [N, L] in [-20, 20], constant, 0 off the mask."""
    return log_ratio(scored.proximal, scored.behavior, scored.mask)


def sequence_mismatch(scored: Scored) -> Tensor:
    """Product of rho over each rollout: [N, 1], its log in [-20, 20]."""
    whole = rollout_sum(log_mismatch(scored), scored.mask)
    return whole.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def inside(values: Tensor, low: float, high: float) -> Tensor:
    """`values` where they lie in [low, high], else 0."""
    return torch.where((values >= low) & (values <= high), values, torch.zeros_like(values))


def check_cap(cap: float) -> None:
    """Raises ConfigError for a cap that leaves nothing."""
    if cap <= 0:
        raise ConfigError(f"cap: {cap} must be positive")


def check_band(low: float, high: float) -> None:
    """Raises ConfigError for a band of ratios that does not hold 1, so that fresh data would be refused."""
    if not 0 <= low <= 1 <= high:
        raise ConfigError(f"low, high: the band [{low}, {high}] must lie above 0 and hold the ratio 1")


class MismatchPart(CorrectionPart):
    """Base of corrections by rho, the policy at the start of the update over the generator."""

    __slots__ = ()

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS, Requirement.PROXIMAL_LOGPROBS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch(MismatchPart):
    """The whole ratio of each token, bounded only so that it stays finite.

    Source: arXiv:2110.00641; AReaL, arXiv:2505.24298.
    """

    equation: ClassVar[str] = "L_t <- sg[rho_t] L_t"

    def __call__(self, scored: Scored) -> Tensor:
        return log_mismatch(scored).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedMismatch(MismatchPart):
    """The ratio of each token, cut at a cap.

    Source: TIS, https://fengyao.notion.site/off-policy-rl; verl `rollout_corr_helper`; TRL `token_truncate`.
    """

    equation: ClassVar[str] = "L_t <- sg[min(rho_t, cap)] L_t"
    cap: float = 2.0

    def __post_init__(self) -> None:
        check_cap(self.cap)

    def __call__(self, scored: Scored) -> Tensor:
        return log_mismatch(scored).exp().clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedSequenceMismatch(MismatchPart):
    """The ratio of the response, cut at a cap, on all its tokens. Unbiased before it is cut.

    Source: verl `rollout_corr_math` (sequence TIS); TRL `sequence_truncate`.
    """

    equation: ClassVar[str] = "L_t <- sg[min(prod_t rho_t, cap)] L_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    cap: float = 2.0

    def __post_init__(self) -> None:
        check_cap(self.cap)

    def __call__(self, scored: Scored) -> Tensor:
        return sequence_mismatch(scored).clamp(max=self.cap).expand(scored.mask.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedMismatch(MismatchPart):
    """The ratio of each token inside a band; outside it the token is dropped.

    Source: IcePop, arXiv:2510.18855; TRL `token_mask`. AReaL's cap is the band [0, cap].
    """

    equation: ClassVar[str] = "L_t <- sg[rho_t 1[low <= rho_t <= high]] L_t"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def __call__(self, scored: Scored) -> Tensor:
        return inside(log_mismatch(scored).exp(), self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSequenceMismatch(MismatchPart):
    """The ratio of the response inside a band; outside it the whole response is dropped.

    Source: verl `rollout_corr_math` (sequence MIS); TRL `sequence_mask`.
    """

    equation: ClassVar[str] = "L_t <- sg[P_i 1[low <= P_i <= high]] L_t, P_i = prod_t rho_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def __call__(self, scored: Scored) -> Tensor:
        return inside(sequence_mismatch(scored), self.low, self.high).expand(scored.mask.shape)
