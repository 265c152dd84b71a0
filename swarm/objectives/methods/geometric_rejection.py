"""Geo-RS: responses whose length-normalised mismatch leaves a narrow band are dropped, the others not weighted.

The band of 0.1 % is meant for engine noise; data of another policy version is refused almost wholly, so widen
it for stale rollouts. Ours: GRPO's clip around the start of the update and a token mean as the host.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.rejection import GeometricRejection
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="geometric_rejection",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="Geo-RS",
    arxiv="",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(GeometricRejection(low=0.999, high=1.001),),
    aggregate=TokenMean(),
)
