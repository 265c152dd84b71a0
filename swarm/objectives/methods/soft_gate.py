"""Soft Adaptive Policy Optimization (the SAPO of Qwen): a smooth gate of the ratio in place of the clip.

Negative tokens decay faster. Not the SAPO that shares rollouts in a swarm; that is `swarm_sampling`.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.gate import SoftGate
from swarm.objectives.recipe import Recipe

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
