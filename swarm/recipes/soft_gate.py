"""Soft Adaptive Policy Optimization (the SAPO of Qwen): a smooth gate of the ratio in place of the clip.

Negative tokens decay faster. Not the SAPO that shares rollouts in a swarm; that is `swarm_sampling`.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import RolloutMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.gate import SoftGate

RECIPE = Recipe(
    name="soft_gate",
    title="Soft Adaptive Policy Optimization",
    acronym="SAPO (soft)",
    arxiv="2511.20347",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=SoftGate(),
    aggregate=RolloutMean(),
)
