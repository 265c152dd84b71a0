"""W-REINFORCE: correct rollouts with advantage 0.1, incorrect ones with -1.

Ours: a reward above 0.5 is correct.
"""

from swarm.objectives.parts.advantage.sign import SignWeights
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="weighted_reinforce",
    title="The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning",
    acronym="W-REINFORCE",
    arxiv="2506.01347",
    row="S164",
    verification="code",
    advantage=SignWeights(positive=0.1, negative=1.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
