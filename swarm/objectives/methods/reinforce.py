"""REINFORCE with the group's baseline and no correction at all: rollouts count as if generated here and now.

    token mean of -A log pi, A the group z-score

No ratio and no clip. Every off-policy method has to beat this recipe, and our staleness benchmark uses it as the
baseline. It needs no log-probs of the generator. Ours: the group z-score and the token mean, as in the methods of
the comparison.

Mechanism: uncorrected.
"""

from swarm.objectives.parts import GroupZScore, Likelihood, NoRatio, TokenMean
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="reinforce",
    title="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    acronym="REINFORCE",
    url="https://doi.org/10.1007/BF00992696",
    verification="ours",
    advantage=GroupZScore(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
