"""BAPO, as its paper has it: the upper bound first, shares weighted by the sampling probability."""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.balanced import BalancedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="balanced_clip_paper",
    title="BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via "
    "Balanced Policy Optimization with Adaptive Clipping",
    acronym="BAPO",
    arxiv="2510.18927",
    row="S075",
    verification="paper",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BalancedClip(
        form="paper",
        target=0.4,
        low_start=0.6,
        low_max=0.9,
        low_step=0.02,
        high_start=1.2,
        high_max=3.0,
        high_step=0.05,
        dual=0.0,
    ),
    aggregate=TokenMean(),
)
