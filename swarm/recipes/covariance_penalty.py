"""KL-Cov: the few tokens whose likelihood and advantage rise together most pay for leaving the old policy.

The surrogate itself is not clipped.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.covariance import CovariancePenalty

RECIPE = Recipe(
    name="covariance_penalty",
    title="The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    acronym="KL-Cov",
    arxiv="2505.22617",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=CovariancePenalty(),
    aggregate=TokenMean(),
)
