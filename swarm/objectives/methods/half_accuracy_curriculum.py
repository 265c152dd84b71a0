"""FG-ExPO: prompts around half accuracy, and a KL penalty that tightens as accuracy grows.

The paper adds both to GRPO. Ours: GRPO's clip of 0.2 and its mean over rollouts, also for the penalty.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.prompts.accuracy import GaussianAccuracy
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.steered import AccuracyKl
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="half_accuracy_curriculum",
    title="FG-ExPO: Frontier-Guided Exploration-Prioritized Policy Optimization via Adaptive KL and "
    "Gaussian Curriculum",
    acronym="FG-ExPO",
    arxiv="2605.11403",
    row="S146",
    verification="paper",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(AccuracyKl(strength=0.02, mean="rollout"),),
    prompts=GaussianAccuracy(),
)
