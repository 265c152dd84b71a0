"""Detached clip (CISPO): the importance ratio, capped, as a constant weight of REINFORCE; no token loses its gradient.

    token mean of -sg[clip(r, 0, 1.28)] A log pi, group z-score

The original tunes the upper bound only and has no lower bound; it gives no number, 0.28 is Trinity's. TRL
and ScaleRL write the same rule with an absolute cap of 5, which is `weight.high` = 4 here.
"""

from swarm.objectives.parts import DetachedClip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="cispo",
    title="MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    acronym="CISPO",
    arxiv="2506.13585",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=0.28),
    aggregate=TokenMean(),
)
