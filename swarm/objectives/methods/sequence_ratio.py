"""GSPO: one length-normalised ratio for each response, clipped as a whole.

The clip acts on responses, so its half-widths are a thousandth of those of token methods.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.sequence import SequenceRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

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
