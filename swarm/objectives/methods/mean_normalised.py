"""MaxRL: advantages divided by the group's mean reward, so that rare successes weigh as under maximum likelihood.

For binary rewards. Ours: the clipped token surrogate around it.
"""

from swarm.objectives.parts.advantage.group import MeanNormalised
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="mean_normalised",
    title="Maximum Likelihood Reinforcement Learning",
    acronym="MaxRL",
    arxiv="2602.02710",
    verification="code",
    advantage=MeanNormalised(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
