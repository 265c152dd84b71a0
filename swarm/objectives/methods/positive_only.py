"""PSR: only correct rollouts are learned from, each with advantage 1.

Ours: a reward above 0.5 is correct, and rollouts that are left out still count in the token mean.
"""

from swarm.objectives.parts.advantage.sign import SignWeights
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="positive_only",
    title="The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning",
    acronym="PSR",
    arxiv="2506.01347",
    row="S164",
    verification="code",
    advantage=SignWeights(positive=1.0, negative=0.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
