"""REINFORCE++-baseline: rewards minus their group's mean, whitened over all tokens of the step.

The paper adds a KL term to the loss; as in `grpo` it is left out.
"""

from swarm.objectives.parts.advantage.batch import WhitenedGroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

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
