"""Pass@k GRPO: only the best response of a group learns, by its lead over the second best.

With binary rewards that is the only success of a group, and groups with more than one say nothing.
Ours: the token mean.
"""

from swarm.objectives.parts.advantage.group import BestOfGroup
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="best_of_group",
    title="Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
    acronym="pass@k GRPO",
    arxiv="2503.19595",
    verification="code",
    advantage=BestOfGroup(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
