"""GBPO: the ratio is regressed onto the optimum of a bounded-ratio problem, weighted by the advantage.

The target is the upper bound above the group's median reward and the lower one below it; the temperature
1e-4 makes it nearly binary. Ours: half-widths 0.2 of the published 0.2 to 0.3; the median of an even group
is the mean of the middle two.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.target import BoundedRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="bounded_ratio",
    title="Bounded Ratio Reinforcement Learning",
    acronym="GBPO",
    arxiv="2604.18578",
    row="S129",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BoundedRatio(),
    aggregate=TokenMean(),
)
