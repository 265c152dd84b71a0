"""CAPO (curvature-aware): tokens whose predicted step breaks a trust region in the last layer are masked.

The objective itself is GRPO's; predictions and thresholds are those of the authors' code, along a plain
gradient step. Ours: the length of that step, which follows from the step's own mean shift (see the part).
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.correction.curvature import CurvatureMask
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="curvature_mask",
    title="Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning",
    acronym="CAPO",
    arxiv="2510.00819",
    row="S114",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(CurvatureMask(),),
    aggregate=RolloutMean(),
)
