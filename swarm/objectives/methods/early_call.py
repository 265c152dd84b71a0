"""ASPO (tool use): successes that call their tool earlier get a bounded bonus on the advantage itself.

Added to the reward it would be normalised away or let a wrong answer win; added here it can never turn a
sign. Ours: the call stands at the end of the first turn; clip and token mean around it.
"""

from swarm.objectives.parts.advantage.turns import EarlyCall
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="early_call",
    title="Understanding Tool-Integrated Reasoning",
    acronym="ASPO (tool use)",
    arxiv="2508.19201",
    row="S140",
    verification="code",
    advantage=EarlyCall(strength=2.0, bound=0.7),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
