"""AEPO (agentic, entropy-balanced), its objective: clipped rising tokens keep a gradient, uncertain ones weigh more.

The other half of the method, how many branches a tool call gets, belongs to the generator and is left out.
Not the AEPO that holds an arbitrary entropy. Ours: token mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.shape.confidence import EntropyScaled
from swarm.objectives.parts.weight.preserving import PreservingClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="entropy_balanced_clip",
    title="Agentic Entropy-Balanced Policy Optimization",
    acronym="AEPO",
    arxiv="2510.14545",
    row="S067",
    verification="code",
    advantage=GroupZScore(),
    shapers=(EntropyScaled(),),
    ratio=TokenRatio(),
    weight=PreservingClip(preserve="upper", dual=3.0),
    aggregate=TokenMean(),
)
