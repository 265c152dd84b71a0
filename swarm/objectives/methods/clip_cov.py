"""Clip-Cov: a few tokens whose likelihood and advantage rise together, which cost most entropy, are left out.

    token mean of PPO (.8, 1.2) without the top token of cov in (1, 5), cov = (A - mean)(log pi - mean)

The published rule draws these tokens at random among those between two bounds of the covariance. Ours: the tokens
of largest covariance between the bounds, so that a run can be repeated.
"""

from swarm.objectives.parts import CovarianceClip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="clip_cov",
    title="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    acronym="Clip-Cov",
    arxiv="2505.22617",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=CovarianceClip(),
    aggregate=TokenMean(),
)
