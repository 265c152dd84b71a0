"""GPPO: a token beyond a clip bound keeps a gradient, that of the bound times log pi.

    token mean of -min(r A, clip(r, .8 r/sg[r], 1.2 r/sg[r]) A)

Ours: half-widths 0.2, group z-score, token mean.
"""

from swarm.objectives.parts import GroupZScore, PreservingClip, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="gppo",
    title="Klear-Reasoner: Advancing Reasoning Capability via Gradient-Preserving Clipping Policy Optimization",
    acronym="GPPO",
    arxiv="2508.07629",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=PreservingClip(preserve="both"),
    aggregate=TokenMean(),
)
