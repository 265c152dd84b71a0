"""Rejection of whole responses that the policy would hardly have given.

Invariant: a factor is 0 or 1, the same on all tokens of a rollout, without gradient. Rejected responses stay in
the denominators of the loss.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import CorrectionPart, Scope, Scored
from swarm.objectives.parts.correction.mismatch import MismatchPart, check_band, log_mismatch
from swarm.objectives.parts.ratio.sequence import rollout_mean
from swarm.objectives.parts.ratio.token import AgainstPolicy, log_ratio


def keep(is_kept: Tensor, scored: Scored) -> Tensor:
    """bool [N, 1] as a factor [N, L]."""
    return is_kept.to(scored.advantages.dtype).expand(scored.mask.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeometricRejection(MismatchPart):
    """Keeps responses whose length-normalised mismatch lies in a band: the test does not depend on the length.

    Source: Geo-RS, https://richardli.xyz/rl-collapse-3; verl `decoupled_geo_rs`; OpenRLHF `seq-mask-tis`.
    """

    equation: ClassVar[str] = "L_t <- 1[low <= exp(mean_t log rho_t) <= high] L_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    low: float = 0.999
    high: float = 1.001

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def __call__(self, scored: Scored) -> Tensor:
        ratio = rollout_mean(log_mismatch(scored), scored.mask).exp()
        return keep((ratio >= self.low) & (ratio <= self.high), scored)


@dataclass(frozen=True, kw_only=True, slots=True)
class K3Rejection(MismatchPart):
    """Keeps responses whose mean k3 divergence is within a limit; deviations of either sign add up.

    Source: K3-RS, verl `decoupled_k3_rs`.
    """

    equation: ClassVar[str] = "L_t <- 1[mean_t(rho_t - log rho_t - 1) <= limit] L_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    limit: float = 0.01

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"limit: {self.limit} must not be negative")

    def __call__(self, scored: Scored) -> Tensor:
        mismatch = log_mismatch(scored)
        divergence = rollout_mean(torch.expm1(mismatch) - mismatch, scored.mask)
        return keep(divergence <= self.limit, scored)


@dataclass(frozen=True, kw_only=True, slots=True)
class Veto(MismatchPart):
    """Drops a response of which the policy would almost never have given some token.

    Source: verl `rollout_corr_math` (token veto).
    """

    equation: ClassVar[str] = "L_t <- 1[min_t rho_t >= least] L_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    least: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.least < 1:
            raise ConfigError(f"least: {self.least} must lie in [0, 1)")

    def __call__(self, scored: Scored) -> Tensor:
        smallest = log_mismatch(scored).exp().amin(dim=1, keepdim=True)  # off the mask rho is 1
        return keep(smallest >= self.least, scored)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicySequenceMask(AgainstPolicy, CorrectionPart):
    """Drops responses that the policy has left behind, where their advantage would push it further away.

    Source: OPSM, DeepSeek-V3.2, arXiv:2512.02556; TRL `off_policy_mask_threshold`.
    """

    equation: ClassVar[str] = "L_t <- M L_t, M = 0 if A < 0 and mean_t(log mu_t - log pi_t) > limit"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    limit: float = 0.5  # nats per token

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs.detach(), self.denominator(scored), scored.mask)
        is_left = rollout_mean(-ratios, scored.mask) > self.limit
        return (~((scored.advantages < 0) & is_left)).to(scored.advantages.dtype)
