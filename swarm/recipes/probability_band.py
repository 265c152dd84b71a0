"""prime-rl's "ipo" loss: tokens whose probability moved by more than 0.1 in either direction are dropped.

Otherwise as its default loss, `probability_difference_penalty`. Unrelated to the preference method IPO.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.correction.trust import ProbabilityBand
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.term.log_ratio import SquaredLogRatio
from swarm.parts.weight.surrogate import Surrogate

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
