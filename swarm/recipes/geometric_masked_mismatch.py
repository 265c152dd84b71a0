"""seq-mask-tis of OpenRLHF: the whole response is kept or dropped by its length-normalised mismatch, tokens weighted.

Ours: GRPO's clip around the start of the update and a token mean as the host.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.correction.mismatch import Mismatch
from swarm.parts.correction.rejection import GeometricRejection
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="geometric_masked_mismatch",
    title="OpenRLHF: An Easy-to-use, Scalable and High-performance RLHF Framework",
    acronym="seq-mask-tis",
    arxiv="2405.11143",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(
        GeometricRejection(low=0.5, high=5.0),
        Mismatch(),
    ),
    aggregate=TokenMean(),
)
