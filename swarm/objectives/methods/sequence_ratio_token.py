"""GSPO-token: the response's ratio as the value, the token's own log-probability as the gradient.

Equals GSPO in value and gradient while all tokens of a response share one advantage; with token advantages
(shapers) it is the form to use. verl's `gspo` is this one.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.sequence import SequenceTokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="sequence_ratio_token",
    title="Group Sequence Policy Optimization",
    acronym="GSPO-token",
    arxiv="2507.18071",
    verification="code",
    advantage=GroupZScore(),
    ratio=SequenceTokenRatio(),
    weight=Clip(low=3e-4, high=4e-4),
    aggregate=RolloutMean(),
)
