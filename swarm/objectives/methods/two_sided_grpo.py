"""INTELLECT-2's two-sided clip: negatives lose their gradient if their ratio exceeds 4; plus a weak KL term.

    token mean of -min(min(r, 4) A, clip(r, .8, 1.2) A) + .001 k3 to the reference

min(min(r, 4) A, clip(r) A) is PPO's dual clip with constant 4, and is written so. The estimator of the KL term
(k3, token mean) is ours.
"""

from swarm.objectives.parts import Clip, GroupZScore, KlPenalty, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="two_sided_grpo",
    title="INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement Learning",
    acronym="two-sided GRPO",
    arxiv="2505.07291",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2, dual=4.0),
    aggregate=TokenMean(),
    terms=(KlPenalty(strength=0.001, mean="token"),),
)
