"""ASPO (asymmetric importance sampling): positive tokens weigh the inverse of their ratio.

PPO gives a rising token more weight the more it has risen; here the ones that lag behind catch up. Bounds are
wider where the entropy is in the upper fifth of a response, as in the released code. Not the ASPO that shapes
advantages by tool calls.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.preserving import FlippedClip
from swarm.objectives.recipe import Recipe

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
