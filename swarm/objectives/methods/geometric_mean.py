"""GMPO: the geometric mean of a rollout's token ratios in place of the arithmetic one.

Each log-ratio is clipped on the side that the advantage pushes to before it enters the mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.geometric import GeometricMean
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="geometric_mean",
    title="Geometric-Mean Policy Optimization",
    acronym="GMPO",
    arxiv="2507.20673",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=GeometricMean(),
    aggregate=RolloutMean(),
)
