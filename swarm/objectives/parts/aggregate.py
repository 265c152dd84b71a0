"""Means over tokens and rollouts.

Invariant: denominators are totals of a whole rollout, a whole group or the whole optimizer step, never of a part.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AggregatePart, Batch, Scope, Scored


class TokenMean(AggregatePart):
    """Mean over all tokens of the step. Source: arXiv:2503.14476 section 3.3."""

    equation = "L = sum_i sum_t L_t / sum_i |o_i|"

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return losses.sum() / max(1, scored.batch.step_tokens)


class RolloutMean(AggregatePart):
    """Mean over rollouts of the mean over their tokens. Source: arXiv:2402.03300 eq. 3."""

    equation = "L = (1/N) sum_i (1/|o_i|) sum_t L_t"
    scope = Scope.ROLLOUT

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        per_rollout = losses.sum(dim=1) / scored.mask.sum(dim=1).clamp(min=1)
        return per_rollout.sum() / max(1, scored.batch.step_rollouts)


class RolloutSum(AggregatePart):
    """Mean over rollouts of the sum over their tokens, as in REINFORCE with whole responses as actions.

    Source: arXiv:2402.14740 eq. 6; verl `seq-mean-token-sum`.
    """

    equation = "L = (1/N) sum_i sum_t L_t"

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return losses.sum() / max(1, scored.batch.step_rollouts)


def allowed_length(batch: Batch) -> Tensor:
    """Allowed length of each rollout in tokens, at least its own length and at least 1: int64 [N]."""
    return torch.maximum(batch.max_new_tokens, batch.length).clamp(min=1)


class ConstantLength(AggregatePart):
    """Mean over rollouts of the token sum divided by the allowed length, so that a long response is not discounted.

    A response longer than its declared limit is divided by its own length.

    Source: Dr.GRPO, arXiv:2503.20783; TRL `dr_grpo`.
    """

    equation = "L = (1/N) sum_i (1/limit_i) sum_t L_t"

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return (losses.sum(dim=1) / allowed_length(scored.batch)).sum() / max(1, scored.batch.step_rollouts)


class KeptTokenMean(AggregatePart):
    """Mean over the tokens that are trained on; dropped rollouts do not make the step smaller.

    Source: token mean of arXiv:2503.14476, after the down-sampling of 2510.04996 or the filter of 2506.01347.
    """

    equation = (
        "L = share sum over kept i of sum_t L_t / sum over kept i of |o_i|, "
        "share of the step's tokens (1 but for mixed kinds)"
    )
    scope = Scope.STEP

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return scored.batch.step_share * losses.sum() / scored.mask.sum().clamp(min=1)
