"""VESPO: the whole response's ratio through a gamma-shaped weight that needs no clip.

Far from the data on either side the weight vanishes smoothly; negatives fall off faster. The ratio is to the
generator, staleness and mismatch in one.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.sequence import FullSequenceRatio
from swarm.objectives.parts.weight.gamma import GammaWeight
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="gamma_weight",
    title="VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training",
    acronym="VESPO",
    arxiv="2602.10693",
    verification="code",
    advantage=GroupZScore(),
    ratio=FullSequenceRatio(),
    weight=GammaWeight(),
    aggregate=TokenMean(),
)
