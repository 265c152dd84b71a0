"""CAPO (curvature-aware): tokens whose predicted step breaks a trust region in the last layer are masked.

The objective itself is GRPO's. Known are the two predictions, of the objective's change and of the policy's
shift. Ours: they are taken along a token's own plain gradient step instead of the optimizer's, which needs
neither its state nor the learning rate, with exact softmax sums; and all thresholds, relative to the step.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import RolloutMean
from swarm.parts.correction.curvature import CurvatureMask
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="curvature_mask",
    title="Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning",
    acronym="CAPO",
    arxiv="2510.00819",
    row="S114",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(CurvatureMask(),),
    aggregate=RolloutMean(),
)
