"""Importance ratios: of a token, a turn, a response; and helpers of other ratios.

Invariant: off the mask a log-ratio is exactly 0, on it bounded by +-20 so that exp stays finite.
Shape letters: N rollouts, L longest response in tokens.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from swarm.objectives.part import Bound, Part, RatioPart, Requirement, Scope, Scored, on_mask

LOG_RATIO_BOUND = 20.0

Ceiling = Annotated[float, Bound(above=0, at_most=LOG_RATIO_BOUND)]
"""Upper bound of a log-ratio, above 0, which is the log-ratio of a policy to itself."""

Against = Literal["behavior", "proximal"]
"""The denominator: the policy that sampled (mu), or the one at the start of the update (pi_old)."""


def log_ratio(logprobs: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log pi(token) - log of the denominator's probability: [N, L] in [-20, 20], 0 off the mask."""
    return on_mask(logprobs - denominator, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class AgainstPolicy(Part):
    """Base of parts with a choice of the ratio's denominator; the part needs the log-probs of the chosen policy."""

    against: Against = "behavior"

    @property
    def needs(self) -> frozenset[Requirement]:
        return self.always_needs | {Requirement(f"{self.against}_logprobs")}

    def denominator(self, scored: Scored) -> Tensor:
        """Log-probs [N, L] of the chosen policy."""
        return scored.behavior if self.against == "behavior" else scored.proximal


class NoRatio(RatioPart):
    """The ratio of a policy to itself: the log-ratio is 0, with the gradient of log pi.

    REINFORCE uses this ratio, and so does swarm sampling, which treats rollouts of other nodes as if generated here.

    Source: arXiv:2509.08721 (swarm sampling).
    """

    equation = "r = pi / sg[pi] (value 1)"

    def __call__(self, scored: Scored) -> Tensor:
        return log_ratio(scored.logprobs, scored.logprobs.detach(), scored.mask)


class TokenRatio(AgainstPolicy, RatioPart):
    """The ratio of one token.

    Source: arXiv:1707.06347 section 3; the bound as in verl `core_algos.py`.
    """

    equation = "r_t = exp(clamp(log pi_t - log mu_t, -20, 20))"

    def __call__(self, scored: Scored) -> Tensor:
        return log_ratio(scored.logprobs, self.denominator(scored), scored.mask)


def rollout_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum [N, 1] of `values` [N, L] over each rollout's trained tokens."""
    return on_mask(values, mask).sum(dim=1, keepdim=True)


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


def on_tokens(values: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`values` ([N, 1] or [N, L]) as constants, with the gradient of each token's log pi: [N, L], 0 off the mask."""
    return log_ratio(logprobs, logprobs.detach(), mask) + on_mask(values.detach(), mask)


class SequenceRatio(AgainstPolicy, RatioPart):
    """The length-normalised ratio of a response, with the gradient of all its tokens.

    Source: GSPO, arXiv:2507.18071; the ceiling as in verl `compute_policy_loss_gspo`.
    """

    equation = "r_t = s_i = exp(min(mean_t(log pi_t - log mu_t), ceiling))"
    scope = Scope.ROLLOUT
    ceiling: Ceiling = 10.0  # of log s

    def __call__(self, scored: Scored) -> Tensor:
        denominator = self.denominator(scored)
        return on_mask(mean_log_ratio(scored.logprobs, denominator, scored.mask, self.ceiling), scored.mask)


class FullSequenceRatio(AgainstPolicy, RatioPart):
    """The ratio of a response, the product over its tokens, with the gradient of the token alone.

    Unbiased for a sequence reward; its variance grows with the length.

    Source: verl `rollout_corr_math` (sequence-level weights).
    """

    equation = "r_t = sg[W_i] pi_t / sg[pi_t], W_i = exp(clamp(sum_t d_t, -20, 20)), d_t in [-20, 20]"
    scope = Scope.ROLLOUT

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs.detach(), self.denominator(scored), scored.mask)
        whole = rollout_sum(ratios, scored.mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return on_tokens(whole, scored.logprobs, scored.mask)


def turn_sums(values: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [N, L] over the trained tokens of each turn: [N, K], 0 for a turn without any."""
    turns = torch.where(mask, turn_ids, 0)
    zeros = torch.zeros((values.shape[0], int(turns.max()) + 1), dtype=values.dtype, device=values.device)
    return zeros.scatter_add(1, turns, on_mask(values, mask))


def turn_mean(values: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over the trained tokens of the same rollout and turn: [N, L]; 0 for a turn without any.

    Args:
        values: [N, L].
        turn_ids: int64 [N, L], any numbers.
        mask: bool [N, L].
    """
    numbers, number = torch.unique(turn_ids, return_inverse=True)
    row = torch.arange(values.shape[0], device=values.device)[:, None]
    turns, place = torch.unique((row * numbers.numel() + number).reshape(-1), return_inverse=True)
    zeros = torch.zeros(turns.numel(), dtype=values.dtype, device=values.device)
    kept = on_mask(values, mask).reshape(-1)
    totals = zeros.index_add(0, place, kept)
    counts = zeros.index_add(0, place, mask.reshape(-1).to(values.dtype))
    return (totals / counts.clamp(min=1))[place].reshape(values.shape)


class TurnRatio(AgainstPolicy, RatioPart):
    """The length-normalised ratio of a token's turn, with the gradient of the token alone.

    With a single turn, the ratio is that of `SequenceTokenRatio`.

    Source: AT2PO, arXiv:2601.04767; zzfoutofspace/ATPO `compute_policy_loss_gspo_turn`. The chunks of ROLL
    (`ratio_type` "segment") have the same value and, where a turn has one advantage, the same gradient.
    """

    equation = "r_t = sg[u_k] pi_t / sg[pi_t], u_k = exp(min(mean_{s in turn k of t} d_s, ceiling))"
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.TURNS})
    ceiling: Ceiling = 10.0  # of log u

    def __call__(self, scored: Scored) -> Tensor:
        drift = scored.logprobs.detach() - self.denominator(scored)
        mean = turn_mean(drift, scored.batch.turn_ids, scored.mask)
        return on_tokens(mean, scored.logprobs, scored.mask).clamp(-LOG_RATIO_BOUND, self.ceiling)


class ReferenceRatio(RatioPart):
    """The ratio of one token to the frozen reference policy, whoever generated it.

    Source: A-LoL, arXiv:2305.14718; A*-PO, arXiv:2505.20686.
    """

    equation = "r_t = exp(clamp(log pi_t - log pi_ref_t, -20, 20))"
    always_needs = frozenset({Requirement.REFERENCE_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        return log_ratio(scored.logprobs, scored.reference, scored.mask)
