"""prime-rl's default loss: DPPO's mask on an unclipped surrogate, and a pull of every token's ratio to 1.

The squared log-ratio acts on dropped tokens too, so that they come back.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.trust import ProbabilityDifferenceMask
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.log_ratio import SquaredLogRatio
from swarm.objectives.parts.weight.surrogate import Surrogate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="probability_difference_penalty",
    title="prime-rl: Async RL Training at Scale",
    acronym="DPPO+KL",
    arxiv="",
    url="https://github.com/PrimeIntellect-ai/prime-rl",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Surrogate(),
    corrections=(ProbabilityDifferenceMask(low=0.2, high=0.2),),
    aggregate=TokenMean(),
    terms=(SquaredLogRatio(strength=1e-3),),
)
