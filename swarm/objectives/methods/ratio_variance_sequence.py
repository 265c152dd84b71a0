"""R2VPO, sequence level: the variance of the length-normalised ratio of a response is priced instead of clipped.

As `ratio_variance`, for one ratio a response; a second reproduction has it so. Ours: the length
normalisation, the bound and the update of the price.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.sequence import SequenceRatio
from swarm.objectives.parts.weight.variance import RatioVariance
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="ratio_variance_sequence",
    title="Ratio-Variance Regularized Policy Optimization for Efficient LLM Fine-tuning",
    acronym="R2VPO",
    arxiv="2601.03320",
    row="S135",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=SequenceRatio(),
    weight=RatioVariance(),
    aggregate=RolloutMean(),
)
