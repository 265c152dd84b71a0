"""HBPO: one prompt is asked under several token budgets, and responses compete inside and across them.

The paper's formula with the constants of its code, which differs in detail (it adds the inner comparison
twice and lowers a success that stays far below its budget). Ours: the limits of the clip and the token mean.
"""

from swarm.objectives.parts.advantage.budget import BudgetGroups
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="budget_groups",
    title="Hierarchical Budget Policy Optimization for Adaptive Reasoning",
    acronym="HBPO",
    arxiv="2507.15844",
    row="S142",
    verification="paper",
    advantage=BudgetGroups(height=4.0, cost=1.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
