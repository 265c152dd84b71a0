"""KL-Cov: a penalty for leaving the old policy on the few tokens whose likelihood and advantage covary most.

    token mean of -r A, plus |d| on the top token(s) of cov = (A - mean A)(log pi - mean log pi)

The surrogate itself is not clipped.
"""

import torch

from swarm.objectives.part import PositiveShare, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, TokenMean, TokenRatio, covariances, largest
from swarm.objectives.recipe import Recipe


class CovariancePenalty(WeightPart):
    """The plain surrogate, with a penalty on |log r| at the few tokens of highest covariance."""

    equation = "L_t = -r A + strength |log r| on the largest `share` of cov_t, else -r A"
    scope = Scope.STEP
    share: PositiveShare = 2e-4  # of the step's tokens, at least one
    strength: float = 1.0

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -torch.exp(scored.log_ratio) * scored.advantages
        chosen = largest(covariances(scored), scored.mask, self.share, scored.mask)
        penalty = self.strength * scored.log_ratio.abs()
        return TokenLosses(losses=torch.where(chosen, losses + penalty, losses), bounded=chosen)


RECIPE = Recipe(
    name="kl_cov",
    title="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    acronym="KL-Cov",
    arxiv="2505.22617",
    verification="code",  # verl `kl_cov`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=CovariancePenalty(),
    aggregate=TokenMean(),
)
