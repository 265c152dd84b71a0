"""DPPO-Binary-KL: as `probability_difference_mask`, by the KL divergence of "this token or another".

Bounds 0.05 and the cap 20 on the constant weight are those of the authors' version in verl.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.trust import BernoulliDivergenceMask
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="bernoulli_divergence_mask",
    title="Rethinking the Trust Region in LLM Reinforcement Learning",
    acronym="DPPO-KL",
    arxiv="2602.04879",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=19.0),
    corrections=(BernoulliDivergenceMask(low=0.05, high=0.05),),
    aggregate=TokenMean(),
)
