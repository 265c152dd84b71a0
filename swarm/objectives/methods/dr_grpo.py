"""Constant length (Dr.GRPO): no division by the standard deviation, none by the length of the response.

    sum over tokens of -min(r A, clip(r, .8, 1.2) A) / (N * limit), A = R - mean

The weight of a prompt no longer depends on the spread of its rewards, and a long wrong answer is no longer
pushed down less per token than a short one. Ours: the constant is each generator's token limit, so that
recordings with other limits can be mixed.
"""

from swarm.objectives.parts import Clip, ConstantLength, GroupCentred, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="dr_grpo",
    title="Understanding R1-Zero-Like Training: A Critical Perspective",
    acronym="Dr.GRPO",
    arxiv="2503.20783",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=ConstantLength(),
)
