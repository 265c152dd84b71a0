"""Batch std (Lite PPO): rewards minus their group's mean, in standard deviations of the whole step, token mean.

    A = (R - mean_G) / (std of all rewards of the step + 1e-4); clip .2, token mean

A group with almost equal rewards is no longer scaled up to unit spread.
"""

from swarm.objectives.parts import BatchDeviation, Clip, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="lite_ppo",
    title="Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning",
    acronym="Lite PPO",
    arxiv="2508.08221",
    verification="code",
    advantage=BatchDeviation(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
