"""Constant factors on token losses for the gap between generator and learner: truncation, masks, rejection, vetoes.

Invariant: a factor carries no gradient. Dropped tokens and responses stay in the denominators of the loss.
Shape letters: N rollouts, L longest response in tokens.
"""

from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import Bound, CorrectionPart, NotNegative, Positive, Requirement, Scope, Scored, Share
from swarm.objectives.parts.ratio import LOG_RATIO_BOUND, AgainstPolicy, log_ratio, rollout_mean, rollout_sum


def log_mismatch(scored: Scored) -> Tensor:
    """log rho of each token, rho = pi_proximal / pi_behavior: [N, L] in [-20, 20], constant, 0 off the mask."""
    return log_ratio(scored.proximal, scored.behavior, scored.mask)


def sequence_mismatch(scored: Scored) -> Tensor:
    """Product of rho over each rollout: [N, 1], its log in [-20, 20]."""
    whole = rollout_sum(log_mismatch(scored), scored.mask)
    return whole.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def inside(values: Tensor, low: float, high: float) -> Tensor:
    """`values` where they lie in [low, high], else 0."""
    return torch.where((values >= low) & (values <= high), values, torch.zeros_like(values))


RatioAtMost = Annotated[float, Bound(at_least=1)]
"""Upper end of a band of ratios, at least 1, or fresh data would be dropped. The lower end is a `Share`."""


class MismatchPart(CorrectionPart):
    """Base of corrections by rho, the ratio of the policy at the start of the update to the generator."""

    always_needs = frozenset({Requirement.BEHAVIOR_LOGPROBS, Requirement.PROXIMAL_LOGPROBS})

    __slots__ = ()


class Mismatch(MismatchPart):
    """The whole ratio of each token, bounded only so that it stays finite.

    Source: arXiv:2110.00641; AReaL, arXiv:2505.24298.
    """

    equation = "L_t <- sg[rho_t] L_t"

    def __call__(self, scored: Scored) -> Tensor:
        return log_mismatch(scored).exp()


class TruncatedMismatch(MismatchPart):
    """The ratio of each token, cut at a cap.

    Source: TIS, https://fengyao.notion.site/off-policy-rl; verl `rollout_corr_helper`; TRL `token_truncate`.
    """

    equation = "L_t <- sg[min(rho_t, cap)] L_t"
    cap: Positive = 2.0

    def __call__(self, scored: Scored) -> Tensor:
        return log_mismatch(scored).exp().clamp(max=self.cap)


class TruncatedSequenceMismatch(MismatchPart):
    """The ratio of the response, cut at a cap, on all its tokens. Unbiased before it is cut.

    Source: verl `rollout_corr_math` (sequence TIS); TRL `sequence_truncate`.
    """

    equation = "L_t <- sg[min(prod_t rho_t, cap)] L_t"
    scope = Scope.ROLLOUT
    cap: Positive = 2.0

    def __call__(self, scored: Scored) -> Tensor:
        return sequence_mismatch(scored).clamp(max=self.cap).expand(scored.mask.shape)


class MaskedSequenceMismatch(MismatchPart):
    """The ratio of the response inside a band; outside it the whole response is dropped.

    Source: verl `rollout_corr_math` (sequence MIS); TRL `sequence_mask`.
    """

    equation = "L_t <- sg[P_i 1[low <= P_i <= high]] L_t, P_i = prod_t rho_t"
    scope = Scope.ROLLOUT
    low: Share = 0.5
    high: RatioAtMost = 2.0

    def __call__(self, scored: Scored) -> Tensor:
        return inside(sequence_mismatch(scored), self.low, self.high).expand(scored.mask.shape)


def keep(is_kept: Tensor, scored: Scored) -> Tensor:
    """Converts a bool [N, 1] to a factor [N, L]: 1 for rollouts that are kept, else 0."""
    return is_kept.to(scored.advantages.dtype).expand(scored.mask.shape)


class GeometricRejection(MismatchPart):
    """Keeps responses whose length-normalised mismatch lies in a band: the test does not depend on the length.

    Source: Geo-RS, https://richardli.xyz/rl-collapse-3; verl `decoupled_geo_rs`; OpenRLHF `seq-mask-tis`.
    """

    equation = "L_t <- 1[low <= exp(mean_t log rho_t) <= high] L_t"
    scope = Scope.ROLLOUT
    low: Share = 0.999
    high: RatioAtMost = 1.001

    def __call__(self, scored: Scored) -> Tensor:
        ratio = rollout_mean(log_mismatch(scored), scored.mask).exp()
        return keep((ratio >= self.low) & (ratio <= self.high), scored)


class K3Rejection(MismatchPart):
    """Keeps responses whose mean k3 divergence is within a limit; deviations of either sign add up.

    Source: K3-RS, verl `decoupled_k3_rs`.
    """

    equation = "L_t <- 1[mean_t(rho_t - log rho_t - 1) <= limit] L_t"
    scope = Scope.ROLLOUT
    limit: NotNegative = 0.01

    def __call__(self, scored: Scored) -> Tensor:
        mismatch = log_mismatch(scored)
        divergence = rollout_mean(torch.expm1(mismatch) - mismatch, scored.mask)
        return keep(divergence <= self.limit, scored)


class Veto(MismatchPart):
    """Drops a response with any rho below `least`: a token that the policy would almost never have drawn.

    Source: verl `rollout_corr_math` (token veto).
    """

    equation = "L_t <- 1[min_t rho_t >= least] L_t"
    scope = Scope.ROLLOUT
    least: Annotated[float, Bound(at_least=0, below=1)] = 1e-4

    def __call__(self, scored: Scored) -> Tensor:
        smallest = log_mismatch(scored).exp().amin(dim=1, keepdim=True)  # off the mask rho is 1
        return keep(smallest >= self.least, scored)


def probability(logprobs: Tensor) -> Tensor:
    """Probabilities [N, L] in [0, 1] of `logprobs`, constant; a log-prob that rounding put above 0 counts as 0."""
    return logprobs.detach().clamp(max=0).exp()


def pushed(advantages: Tensor, too_high: Tensor, too_low: Tensor) -> Tensor:
    """Factor [N, L]: 0 for a token already beyond the bound towards which its advantage pushes, else 1.

    Args:
        advantages: [N, L].
        too_high: bool [N, L], tokens whose probability rose too much; counts where A > 0.
        too_low: bool [N, L], tokens whose probability fell too much; counts where A <= 0.
    """
    return (~torch.where(advantages > 0, too_high, too_low)).to(advantages.dtype)


class DivergenceMask(AgainstPolicy, CorrectionPart):
    """Base of masks that drop a token whose probability moved too far in the direction of its advantage."""

    low: NotNegative = 0.15
    high: NotNegative = 0.15


class ProbabilityDifferenceMask(DivergenceMask):
    """Drops tokens whose probability moved by more than a bound in the direction its advantage pushes to.

    Rare tokens may move by a large factor, frequent ones by little. `against` "proximal" is the recompute variant.

    Source: DPPO-Binary-TV, arXiv:2602.04879; sail-sg/Stable-RL; verl `dppo_tv`.
    """

    equation = "L_t <- M L_t, M = 0 if (A > 0, p - p_mu > high) or (A <= 0, p - p_mu < -low)"

    def __call__(self, scored: Scored) -> Tensor:
        moved = probability(scored.logprobs) - probability(self.denominator(scored))
        return pushed(scored.advantages, moved > self.high, moved < -self.low)
