"""DISPO: the ratio as a constant weight of REINFORCE, with separate bounds for right and wrong rollouts.

The bounds are the paper's. Its filter of uniform groups is the sampler's work, its penalty on overlong
answers a reward part of its own (`Overlong`), and the learner chooses the learning rate.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.detached import FourBounds

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
