"""A*-PO: the scaled log-ratio to the reference policy is regressed onto the optimal advantage.

The optimal value of a prompt comes from the reference policy's own answers, taken beforehand. No ratio to the
generator: rollouts of any origin can be used, which the paper, with one fresh answer a prompt, does not do.
"""

from swarm.objectives.parts.advantage.reference import SoftValueLead
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.reference import ReferenceRatio
from swarm.objectives.parts.weight.target import TrajectoryRegression
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="optimal_advantage_regression",
    title="Accelerating RL for LLM Reasoning with Optimal Advantage Regression",
    acronym="A*-PO",
    arxiv="2505.20686",
    verification="code",
    advantage=SoftValueLead(),
    ratio=ReferenceRatio(),
    weight=TrajectoryRegression(scale=1e-3),
    aggregate=RolloutMean(),
)
