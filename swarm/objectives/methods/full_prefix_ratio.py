"""Exact prefix weights: every token counts by the ratio of all tokens up to it, as a capped constant weight.

What MinPRO approximates, and its negative result: the product drifts to 0 or to the cap along a long response.
Ours: no lower bound, cap 2, as in `min_prefix_ratio`, to compare the two.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.prefix import FullPrefixRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="full_prefix_ratio",
    title="A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization",
    acronym="prefix IS",
    arxiv="2601.22718",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=FullPrefixRatio(),
    weight=DetachedClip(low=1.0, high=1.0),
    aggregate=TokenMean(),
)
