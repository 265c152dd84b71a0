"""AsymRE: plain REINFORCE with a baseline below the group's mean, so that successes weigh more than failures.

No ratio and no clip. Groups of equal rewards keep a small positive advantage, as the formula has it.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.shifted import ShiftedMean
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import NoRatio
from swarm.parts.weight.detached import Likelihood

RECIPE = Recipe(
    name="shifted_baseline",
    title="Asymmetric REINFORCE for off-Policy Reinforcement Learning: Balancing positive and negative rewards",
    acronym="AsymRE",
    arxiv="2506.20520",
    row="S159",
    verification="code",
    advantage=ShiftedMean(shift=-0.1),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
