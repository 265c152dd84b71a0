"""REINFORCE with the importance ratio truncated to [0, 1] as a constant weight, as in ROLL.

Of CISPO's kind; here no token ever counts more than it would on policy. Ours: group z-score, token mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="truncated_reinforce",
    title="Reinforcement Learning Optimization for Large-Scale Learning: An Efficient and "
    "User-Friendly Scaling Library",
    acronym="TIS-REINFORCE",
    arxiv="2506.06122",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=0.0),
    aggregate=TokenMean(),
)
