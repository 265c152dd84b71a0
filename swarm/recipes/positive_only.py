"""PSR: only correct rollouts are learned from, each with advantage 1.

Ours: a reward above 0.5 is correct, and rollouts that are left out still count in the token mean.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.sign import SignWeights
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.clip import Clip

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
