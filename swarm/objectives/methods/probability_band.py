"""prime-rl's "ipo" loss: tokens whose probability moved by more than 0.1 in either direction are dropped.

Otherwise as its default loss, `probability_difference_penalty`. Unrelated to the preference method IPO.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.trust import ProbabilityBand
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.log_ratio import SquaredLogRatio
from swarm.objectives.parts.weight.surrogate import Surrogate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="probability_band",
    title="prime-rl: Async RL Training at Scale",
    acronym="prime-rl IPO",
    arxiv="",
    url="https://github.com/PrimeIntellect-ai/prime-rl",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Surrogate(),
    corrections=(ProbabilityBand(width=0.1),),
    aggregate=TokenMean(),
    terms=(SquaredLogRatio(strength=1e-3),),
)
