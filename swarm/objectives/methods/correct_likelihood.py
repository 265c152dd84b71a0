"""Clip-higher, and the likelihood of rollouts that were right beside it.

The term is VAPO's (positive-example language-model loss, strength 0.1): a right answer is learned from even where
its ratio is clipped and, with replay.keep_zero_variance = true, where its whole group was right. Ours is the rest: VAPO
stands on a critic with its own estimator, of which nothing is here; the surrogate is the clip of `clip_higher` on
the group z-score, a mean over tokens.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.likelihood import CorrectLikelihood
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="correct_likelihood",
    title="Clip-higher with the likelihood of correct rollouts",
    acronym="",
    arxiv="",
    url="https://arxiv.org/abs/2504.05118",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
    terms=(CorrectLikelihood(),),
)
