"""DPPO-Binary-TV: tokens whose probability itself moved too far are dropped; rare tokens may change by any factor.

The anchor is the policy that sampled, also with several updates a batch. Bounds 0.15 and the cap 20 on the
constant weight are those of the authors' version in verl; their paper's experiments vary.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.trust import ProbabilityDifferenceMask
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="probability_difference_mask",
    title="Rethinking the Trust Region in LLM Reinforcement Learning",
    acronym="DPPO-TV",
    arxiv="2602.04879",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=19.0),
    corrections=(ProbabilityDifferenceMask(low=0.15, high=0.15),),
    aggregate=TokenMean(),
)
