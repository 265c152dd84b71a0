"""ASPO (asymmetric importance sampling): positive tokens weigh the inverse of their ratio.

PPO gives a rising token more weight the more it has risen; here the ones that lag behind catch up. Bounds are
wider where the entropy is in the upper fifth of a response, as in the released code. Not the ASPO that shapes
advantages by tool calls.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.preserving import FlippedClip

RECIPE = Recipe(
    name="flipped_ratio",
    title="ASPO: Asymmetric Importance Sampling Policy Optimization",
    acronym="ASPO",
    arxiv="2510.06062",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=FlippedClip(),
    aggregate=TokenMean(),
)
