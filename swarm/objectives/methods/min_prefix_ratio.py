"""MinPRO: a token's ratio times the smallest ratio of its prefix, as a capped constant weight.

No token loses its gradient to the clip; only its weight is bounded. The paper's clip constants are not
known to us. Ours: no lower bound, cap 2.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.prefix import PrefixMinimumRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="min_prefix_ratio",
    title="A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization",
    acronym="MinPRO",
    arxiv="2601.22718",
    row="S182",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=PrefixMinimumRatio(),
    weight=DetachedClip(low=1.0, high=1.0),
    aggregate=TokenMean(),
)
