"""ADORA: groups in which thinking longer did not help are damped to a tenth.

A group is useful when its longest success is longer than its usual failure. The released threshold for
failures that were cut off is 4054 tokens; ours is a share of what each generator was allowed. Ours: clip and
token mean around it.
"""

from swarm.objectives.parts.advantage.robust import UsefulGroups
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="useful_groups",
    title="ADORA: Training Reasoning Models with Dynamic Advantage Estimation on Reinforcement Learning",
    acronym="ADORA",
    arxiv="2602.10019",
    row="S147",
    verification="code",
    advantage=UsefulGroups(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
