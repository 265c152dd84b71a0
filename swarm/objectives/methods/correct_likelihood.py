"""Clip-higher, with an added term for the likelihood of correct rollouts.

    token mean of PPO (.8, 1.28) on the z-score, minus .1 times the mean of log pi over tokens of rewards of 1

The term is VAPO's (positive-example language-model loss, strength 0.1): a right answer is learned from even where
its ratio is clipped and, with replay.keep_zero_variance = true, where its whole group was right. Ours: the rest, as
VAPO's critic and its estimator are left out; the surrogate is the clip of `dapo` on the group z-score, a mean over
tokens.
"""

import torch
from torch import Tensor

from swarm.objectives.part import NotNegative, Scope, Scored, TermPart, masked_sum
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class CorrectLikelihood(TermPart):
    """Negative log-likelihood of the step's correct rollouts, averaged over their tokens; 0 if no rollout is correct.

    Source: VAPO, arXiv:2504.05118 section 4.3 (strength 0.1).
    """

    equation = (
        "L -= strength share sum_{i: R_i >= correct} sum_t log pi_t / sum_{i: R_i >= correct} |o_i|, "
        "share of the step's tokens (1 but for mixed kinds)"
    )
    scope = Scope.STEP
    strength: NotNegative = 0.1
    correct: float = 1.0  # least reward that counts

    def __call__(self, scored: Scored) -> Tensor:
        chosen = scored.mask & (scored.batch.rewards >= self.correct)[:, None]
        strength = self.strength * scored.batch.step_share
        return -strength * masked_sum(scored.logprobs, chosen) / torch.clamp(chosen.sum(), min=1)


RECIPE = Recipe(
    name="correct_likelihood",
    title="Clip-higher with the likelihood of correct rollouts",
    url="https://arxiv.org/abs/2504.05118",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
    terms=(CorrectLikelihood(),),
)
