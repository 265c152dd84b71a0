"""OPO: the baseline is the group's mean reward weighted by response length.

That is near the baseline of least gradient variance when a gradient grows with the number of tokens. The
paper trains exactly on-policy, where every ratio is 1. Ours: ratio and clip, for rollouts that are not.
"""

from swarm.objectives.parts.advantage.group import LengthWeightedBaseline
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="length_weighted_baseline",
    title="On-Policy RL with Optimal Reward Baseline",
    acronym="OPO",
    arxiv="2505.23585",
    verification="code",
    advantage=LengthWeightedBaseline(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
