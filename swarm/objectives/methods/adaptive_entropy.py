"""Skywork-OR1's adaptive entropy control (MAGIC): a bonus that acts only while entropy is under its target.

The token-mean surrogate without KL around it is Skywork-OR1's. Ours: the strength never falls under 0; the
entropy that is compared is that of the step's own tokens, foreign ones included.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.entropy import AdaptiveEntropy
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="adaptive_entropy",
    title="Skywork Open Reasoner 1 Technical Report",
    acronym="MAGIC",
    arxiv="2505.22312",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
    terms=(AdaptiveEntropy(start=0.01, pace=0.005, target=0.2),),
)
