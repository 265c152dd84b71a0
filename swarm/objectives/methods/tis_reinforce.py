"""Truncated reinforce: REINFORCE with the importance ratio truncated to [0, 1] as a constant weight, as in ROLL.

    token mean of -sg[min(r, 1)] A log pi, group z-score

Of CISPO's kind; here no token ever counts more than it would on policy. Ours: group z-score, token mean.
"""

from swarm.objectives.parts import DetachedClip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="tis_reinforce",
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
