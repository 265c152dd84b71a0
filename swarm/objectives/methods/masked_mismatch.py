"""IcePop: tokens whose probabilities at generator and learner differ too much are dropped, the rest weighted.

Dropped tokens stay in the denominator. Ours: GRPO's clip with a token mean as the host.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.mismatch import MaskedMismatch
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="masked_mismatch",
    title="Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    acronym="IcePop",
    arxiv="2510.18855",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(MaskedMismatch(low=0.5, high=5.0),),
    aggregate=TokenMean(),
)
