"""Policy mirror descent of Kimi k1.5 as published: the scaled log-ratio of a rollout is regressed onto its advantage.

The optimum of the KL-regularised problem has exactly that log-ratio, so data of any age can be used. The
normaliser of the optimum is approximated by the group's mean reward, as in the paper. Ours: scale 0.1.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.target import TrajectoryRegression
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="trajectory_regression",
    title="Kimi k1.5: Scaling Reinforcement Learning with LLMs",
    acronym="PMD",
    arxiv="2501.12599",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TrajectoryRegression(scale=0.1),
    aggregate=RolloutMean(),
)
