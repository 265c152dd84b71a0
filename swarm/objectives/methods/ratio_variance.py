"""R2VPO, token level: the variance of the ratio is priced instead of clipped.

Known are the unclipped primal and the price 0.04 of two reproductions. The paper's bound on the variance, its
dual update and its reweighting of stale samples are not known to us. Ours: bound 0.04, a multiplicative
update of the price after every step (see the part), no reweighting, token mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.variance import RatioVariance
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="ratio_variance",
    title="Ratio-Variance Regularized Policy Optimization for Efficient LLM Fine-tuning",
    acronym="R2VPO",
    arxiv="2601.03320",
    row="S135",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=RatioVariance(),
    aggregate=TokenMean(),
)
