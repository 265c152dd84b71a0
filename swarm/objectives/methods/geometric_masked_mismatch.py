"""seq-mask-tis of OpenRLHF: the whole response is kept or dropped by its length-normalised mismatch, tokens weighted.

Ours: GRPO's clip around the start of the update and a token mean as the host.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.mismatch import Mismatch
from swarm.objectives.parts.correction.rejection import GeometricRejection
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

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
