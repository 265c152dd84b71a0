"""GSPO: one length-normalised ratio for each response, clipped as a whole.

The clip acts on responses, so its half-widths are a thousandth of those of token methods.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import RolloutMean
from swarm.parts.ratio.sequence import SequenceRatio
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="sequence_ratio",
    title="Group Sequence Policy Optimization",
    acronym="GSPO",
    arxiv="2507.18071",
    verification="code",
    advantage=GroupZScore(),
    ratio=SequenceRatio(),
    weight=Clip(low=3e-4, high=4e-4),
    aggregate=RolloutMean(),
)
