"""Reinforcement comparison: REINFORCE against a running mean of each prompt's rewards; no group is needed.

The classical baseline, by prompt. Published single-rollout trainers (MSSR among them) refine it in ways whose
formulas we could not read; this is none of them. Ours: the rate, the step's mean for a new prompt, and the
clip around it for rollouts that are not fresh.
"""

from swarm.objectives.parts.advantage.smoothed import PromptTracker
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="prompt_tracker",
    title="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    acronym="reinforcement comparison",
    arxiv="",
    url="https://doi.org/10.1007/BF00992696",
    verification="ours",
    advantage=PromptTracker(rate=0.2),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
