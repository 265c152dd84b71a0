"""PVPO: the baseline is what the reference policy scored on the prompt beforehand, not the group's own mean.

Groups whose rewards are all equal keep a signal, and two rollouts are enough. The paper's filter of prompts
by difficulty, and its injected solutions of a larger model, are samplers and not part of the objective.
Ours: clip and token mean around it.
"""

from swarm.objectives.parts.advantage.shifted import ReferenceAnchor
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="reference_anchor",
    title="PVPO: Pre-Estimated Value-Based Policy Optimization for Agentic Reasoning",
    acronym="PVPO",
    arxiv="2508.21104",
    row="S039",
    verification="secondary",
    advantage=ReferenceAnchor(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
