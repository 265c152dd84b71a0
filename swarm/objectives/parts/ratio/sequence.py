"""Ratios of a whole response, the same value on each of its tokens.

Invariant: every trained token of a rollout has the rollout's own log-ratio, bounded, and 0 off the mask.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import RatioPart, Scope, Scored
from swarm.objectives.parts.ratio.token import LOG_RATIO_BOUND, AgainstPolicy, log_ratio


def rollout_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum [N, 1] of `values` [N, L] over each rollout's trained tokens."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=1, keepdim=True)


def rollout_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean [N, 1] of `values` [N, L] over each rollout's trained tokens; 0 for a rollout without any."""
    return rollout_sum(values, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def mean_log_ratio(logprobs: Tensor, denominator: Tensor, mask: Tensor, ceiling: float) -> Tensor:
    """Log of the length-normalised ratio of each rollout: [N, 1] in [-20, ceiling].

    Args:
        logprobs: [N, L] of the numerator; gradient flows.
        denominator: [N, L].
        mask: bool [N, L].
        ceiling: greatest value.
    """
    return rollout_mean(logprobs - denominator, mask).clamp(-LOG_RATIO_BOUND, ceiling)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [N, 1] on every trained token: [N, L], 0 off the mask."""
    return torch.where(mask, values, torch.zeros_like(values))


def on_tokens(values: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`values` [N, 1] or [N, L] as constants, with the gradient of each token's own log pi: [N, L], 0 off the mask."""
    own = log_ratio(logprobs, logprobs.detach(), mask)
    return own + torch.where(mask, values.detach(), torch.zeros_like(own))


def check_ceiling(ceiling: float) -> None:
    """Raises ConfigError for a bound below 0, which would cut the ratio of a policy to itself, or above 20."""
    if not 0 < ceiling <= LOG_RATIO_BOUND:
        raise ConfigError(f"ceiling: {ceiling} is a log-ratio in (0, {LOG_RATIO_BOUND:g}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRatio(AgainstPolicy, RatioPart):
    """The length-normalised ratio of a response, with the gradient of all its tokens.

    Source: GSPO, arXiv:2507.18071; the ceiling as in verl `compute_policy_loss_gspo`.
    """

    equation: ClassVar[str] = "r_t = s_i = exp(min(mean_t(log pi_t - log mu_t), ceiling))"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    ceiling: float = 10.0  # of log s

    def __post_init__(self) -> None:
        AgainstPolicy.__post_init__(self)
        check_ceiling(self.ceiling)

    def __call__(self, scored: Scored) -> Tensor:
        denominator = self.denominator(scored)
        return spread(mean_log_ratio(scored.logprobs, denominator, scored.mask, self.ceiling), scored.mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTokenRatio(AgainstPolicy, RatioPart):
    """The value of the length-normalised ratio with the gradient of the token alone.

    Token advantages may differ inside a response. A rollout above the ceiling has no gradient.

    Source: GSPO-token, arXiv:2507.18071; verl `compute_policy_loss_gspo`.
    """

    equation: ClassVar[str] = "r_t = exp(min(log sg[s_i] + log pi_t - sg[log pi_t], ceiling))"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    ceiling: float = 10.0  # of log s

    def __post_init__(self) -> None:
        AgainstPolicy.__post_init__(self)
        check_ceiling(self.ceiling)

    def __call__(self, scored: Scored) -> Tensor:
        denominator = self.denominator(scored)
        mean = rollout_mean(scored.logprobs.detach() - denominator, scored.mask)
        return on_tokens(mean, scored.logprobs, scored.mask).clamp(-LOG_RATIO_BOUND, self.ceiling)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSequenceRatio(AgainstPolicy, RatioPart):
    """The ratio of a response, the product over its tokens, with the gradient of the token alone.

    Unbiased for a sequence reward; its variance grows with the length.

    Source: verl `rollout_corr_math` (sequence-level weights).
    """

    equation: ClassVar[str] = "r_t = sg[W_i] pi_t / sg[pi_t], W_i = exp(clamp(sum_t d_t, -20, 20)), d_t in [-20, 20]"
    scope: ClassVar[Scope] = Scope.ROLLOUT

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs.detach(), self.denominator(scored), scored.mask)
        whole = rollout_sum(ratios, scored.mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return on_tokens(whole, scored.logprobs, scored.mask)
