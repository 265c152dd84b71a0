"""Prompt-GDRO: advantages weigh more on kinds of prompts that have been hard for long.

The paper plays this and the game over response counts (`robust_rollout_counts`) independently of each other.
Ours: the constants of the weights (see the part) and the strength of the KL penalty.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import RolloutMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.shape.robust import RobustWeights
from swarm.parts.term.kl import KlPenalty
from swarm.parts.weight.clip import Clip

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
