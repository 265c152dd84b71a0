"""KL-Cov: the few tokens whose likelihood and advantage rise together most pay for leaving the old policy.

The surrogate itself is not clipped.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.covariance import CovariancePenalty
from swarm.objectives.recipe import Recipe

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
