"""AsymRE: plain REINFORCE with a baseline below the group's mean, so that successes weigh more than failures.

No ratio and no clip. Groups of equal rewards keep a small positive advantage, as the formula has it.
"""

from swarm.objectives.parts.advantage.shifted import ShiftedMean
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.weight.detached import Likelihood
from swarm.objectives.recipe import Recipe

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
