"""GPPO: a token beyond a clip bound keeps a gradient, that of the bound times log pi.

Ours: half-widths 0.2, group z-score, token mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.preserving import PreservingClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="preserving_clip",
    title="Klear-Reasoner: Advancing Reasoning Capability via Gradient-Preserving Clipping Policy Optimization",
    acronym="GPPO",
    arxiv="2508.07629",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=PreservingClip(preserve="both"),
    aggregate=TokenMean(),
)
