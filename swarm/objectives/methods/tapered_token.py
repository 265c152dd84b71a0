"""TOPR, as its code bases have it: tokens of unrewarded rollouts weigh their own ratio, tapered into [0, 1].

ROLL and Trinity split by score, not by advantage, and taper each token by itself; the paper's product over
the trajectory is the recipe `tapered_trajectory`. ROLL leaves the advantage open and Trinity takes the
reward. Ours: the reward minus the group's mean, which with Trinity's rewards of +-1 has the same signs; and a
threshold of 0.5 instead of 0, because tasks that give 0.01 for the form of an answer would never be tapered.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.taper import TaperedToken
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="tapered_token",
    title="Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
    acronym="TOPR",
    arxiv="2503.14286",
    row="S155",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TaperedToken(),
    aggregate=TokenMean(),
)
