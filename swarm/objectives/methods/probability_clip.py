"""DCPO (dynamic clipping): the rarer a token was, the wider its clip bounds; advantages remember past visits.

Every rollout counts its token mean and nothing is divided by their number, as in the released code. The
half-widths are the paper's. Not the DCPO that steers entropy.
"""

from swarm.objectives.parts.advantage.smoothed import CumulativeScore
from swarm.objectives.parts.aggregate.mean import RolloutMeanSum
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.token_bounds import ProbabilityClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="probability_clip",
    title="DCPO: Dynamic Clipping Policy Optimization",
    acronym="DCPO (dynamic clipping)",
    arxiv="2509.02333",
    verification="code",
    advantage=CumulativeScore(),
    ratio=TokenRatio(),
    weight=ProbabilityClip(),
    aggregate=RolloutMeanSum(),
)
