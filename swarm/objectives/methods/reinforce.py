"""REINFORCE with the group's baseline and no correction at all: rollouts count as if generated here and now.

No ratio and no clip. It is what every off-policy method has to beat, and the baseline of our staleness
benchmark. Needs no log-probs of the generator. Ours: the group z-score and the token mean, as in the
methods it is compared with.
"""

from swarm.objectives.parts.advantage import GroupZScore
from swarm.objectives.parts.aggregate import TokenMean
from swarm.objectives.parts.likelihood import Likelihood
from swarm.objectives.parts.ratio import NoRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="reinforce",
    title="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    acronym="REINFORCE",
    arxiv="",
    url="https://doi.org/10.1007/BF00992696",
    verification="ours",
    advantage=GroupZScore(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
