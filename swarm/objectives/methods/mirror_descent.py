"""MDPO: the plain surrogate with a growing divergence penalty to the policy of the draw, over several updates.

Written for control tasks. Ours: group advantages in place of a critic's, a horizon of 1000 steps, and the
divergence estimated on the sampled tokens with the gradient of the reverse KL.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.steered import MirrorKl
from swarm.objectives.parts.weight.surrogate import Surrogate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="mirror_descent",
    title="Mirror Descent Policy Optimization",
    acronym="MDPO",
    arxiv="2005.09814",
    row="S084",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Surrogate(),
    aggregate=TokenMean(),
    terms=(MirrorKl(horizon=1000),),
)
