"""BAPO, as its released code has it: clip bounds raised each step until positives weigh as much as negatives.

The paper's own order, measure and numbers are the recipe `balanced_clip_paper`.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.balanced import BalancedClip

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
