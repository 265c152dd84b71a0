"""Prompt-GDRO: advantages weigh more on kinds of prompts that have been hard for long.

The paper plays this and the game over response counts (`robust_rollout_counts`) independently of each other.
Ours: the constants of the weights (see the part) and the strength of the KL penalty.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.shape.robust import RobustWeights
from swarm.objectives.parts.term.kl import KlPenalty
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="robust_prompt_weights",
    title="Group Distributionally Robust Optimization-Driven Reinforcement Learning for LLM Reasoning",
    acronym="Prompt-GDRO",
    arxiv="2601.19280",
    row="S190",
    verification="ours",
    advantage=GroupZScore(),
    shapers=(RobustWeights(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(KlPenalty(strength=0.001, estimator="k3", to="reference", mean="rollout"),),
)
