"""Rollout-GDRO: more responses to prompts whose rewards vary, at a fixed mean of responses.

The game over the weights of prompts is `robust_prompt_weights`. Ours is the core: how the
counts are found and their constants (see the part), where the paper learns them by EXP3P; and the strength of
the KL penalty.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.prompts.robust import RobustCounts
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.kl import KlPenalty
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="robust_rollout_counts",
    title="Group Distributionally Robust Optimization-Driven Reinforcement Learning for LLM Reasoning",
    acronym="Rollout-GDRO",
    arxiv="2601.19280",
    row="S190",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(KlPenalty(strength=0.001, estimator="k3", to="reference", mean="rollout"),),
    prompts=RobustCounts(),
)
