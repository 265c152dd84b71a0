"""GSPO-token: the response's ratio as the value, the token's own log-probability as the gradient.

Equals GSPO in value and gradient while all tokens of a response share one advantage; with token advantages
(shapers) it is the form to use. verl's `gspo` is this one.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import RolloutMean
from swarm.parts.ratio.sequence import SequenceTokenRatio
from swarm.parts.weight.clip import Clip

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
