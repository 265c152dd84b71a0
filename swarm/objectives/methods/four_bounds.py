"""DISPO: the ratio as a constant weight of REINFORCE, with separate bounds for right and wrong rollouts.

The bounds are the paper's. Its filter of uniform groups is the sampler's work, its penalty on overlong
answers a reward part of its own (`Overlong`), and the learner chooses the learning rate.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.detached import FourBounds
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="four_bounds",
    title="DISPO: Enhancing Training Efficiency and Stability in Reinforcement Learning for "
    "Large Language Model Mathematical Reasoning",
    acronym="DISPO",
    arxiv="2602.00983",
    row="S183",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=FourBounds(),
    aggregate=TokenMean(),
)
