"""K3-RS: responses whose mean k3 divergence from the generator exceeds 0.01 are dropped, the others not weighted.

Tokens that became likelier and tokens that became rarer do not cancel, as they do in `geometric_rejection`.
Ours: GRPO's clip around the start of the update and a token mean as the host.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.rejection import K3Rejection
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="k3_rejection",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="K3-RS",
    arxiv="",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(K3Rejection(limit=0.01),),
    aggregate=TokenMean(),
)
