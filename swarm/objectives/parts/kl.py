"""Summands of the loss: divergence from another policy on the sampled tokens, and mean entropy.

Invariant: log-probability differences are bounded by +-20, so that no estimate and no gradient is infinite;
means are over totals of the whole step.
Shape letters: N rollouts, L longest response in tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from swarm.objectives.part import NotNegative, Requirement, Scope, Scored, TermPart, masked_sum
from swarm.objectives.parts.ratio import log_ratio

K3_BOUND = 10.0


Target = Literal["reference", "proximal"]
"""The policy to stay near: the frozen reference, or the one at the start of the update."""


Sampler = Literal["behavior", "proximal"]
"""The policy that a token counts as sampled from."""


Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
"""k1 = D, k2 = D^2/2, k3 = exp(-D) + D - 1 with D = log pi - log target; k1+ and k3+ have the gradient of k2."""


Mean = Literal["token", "rollout"]
"""Mean over the tokens of the step, or over rollouts of the mean over their tokens."""


def difference(scored: Scored, to: Target | Sampler) -> Tensor:
    """log pi minus the log-probs of the policy `to`: [N, L] in [-20, 20], 0 off the mask."""
    return log_ratio(scored.logprobs, getattr(scored, to), scored.mask)


def estimate(gap: Tensor, estimator: Estimator) -> Tensor:
    """Estimate of KL(pi || target) from each token, of the shape of `gap`.

    Args:
        gap: log pi - log target, bounded.
        estimator: name of the estimator.

    Source: Schulman, "Approximating KL divergence" (2020); verl `kl_penalty`, whose bounds (k3 at +-10) these are.
    """
    squared = gap**2 / 2
    if estimator == "k2":
        return squared
    value = gap if estimator.startswith("k1") else (torch.exp(-gap) + gap - 1).clamp(-K3_BOUND, K3_BOUND)
    return value.detach() + squared - squared.detach() if estimator.endswith("+") else value


def step_mean(values: Tensor, scored: Scored, mean: Mean) -> Tensor:
    """Mean of `values` [N, L] over the step's tokens or rollouts: a scalar that adds up over micro-batches."""
    if mean == "token":
        return masked_sum(values, scored.mask) / max(1, scored.batch.step_tokens)
    lengths = scored.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return masked_sum(values / lengths, scored.mask) / max(1, scored.batch.step_rollouts)


def need_of(to: Target | Sampler) -> frozenset[Requirement]:
    """Requirement for the log-probs of the policy `to`, as a set of one."""
    return frozenset({Requirement(f"{to}_logprobs")})


class KlPenalty(TermPart):
    """Keeps the policy near a target policy, by an estimate of KL(pi || target).

    On policy, the gradient of k2 is that of the reverse KL, that of k1 is 0 in expectation, and that of k3 is the
    forward KL's. Off policy, none of these gradients is corrected: see `ImportanceKl`.

    Source: arXiv:2402.03300 eq. 4 (k3 to the reference, inside the rollout mean); verl `kl_penalty`.
    """

    equation = "L += strength * mean_t k(D_t), D = log pi - log pi_to"
    scope = Scope.ROLLOUT
    strength: NotNegative = 0.04
    estimator: Estimator = "k3"
    to: Target = "reference"
    mean: Mean = "rollout"

    @property
    def needs(self) -> frozenset[Requirement]:
        return need_of(self.to)

    def __call__(self, scored: Scored) -> Tensor:
        return self.strength * step_mean(estimate(difference(scored, self.to), self.estimator), scored, self.mean)


def mean_entropy(scored: Scored) -> Tensor:
    """Mean entropy of trained tokens over the tokens of the step: a scalar that adds up over micro-batches."""
    return step_mean(scored.entropy, scored, "token")


class EntropyBonus(TermPart):
    """A constant bonus on the mean entropy of trained tokens.

    Source: arXiv:1707.06347 eq. 9; verl `entropy_coeff`.
    """

    equation = "L -= strength * mean_t H_t"
    strength: float = 0.001

    def __call__(self, scored: Scored) -> Tensor:
        return -self.strength * mean_entropy(scored)
