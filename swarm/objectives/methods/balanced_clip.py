"""BAPO, as its released code has it: clip bounds raised each step until positives weigh as much as negatives.

The paper's own order, measure and numbers are the recipe `balanced_clip_paper`.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.balanced import BalancedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="balanced_clip",
    title="BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via "
    "Balanced Policy Optimization with Adaptive Clipping",
    acronym="BAPO",
    arxiv="2510.18927",
    row="S075",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BalancedClip(form="code"),
    aggregate=TokenMean(),
)
