"""REINFORCE++-baseline: rewards minus their group's mean, whitened over all tokens of the step.

The paper adds a KL term to the loss; as in `grpo` it is left out.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.batch import WhitenedGroupCentred
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="batch_whitened_baseline",
    title="REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    acronym="REINFORCE++-baseline",
    arxiv="2501.03262",
    verification="code",
    advantage=WhitenedGroupCentred(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
