"""Correction across tokenizers (ours): the ratio of pieces of text that two tokenizers both cut out.

A rollout of another tokenizer is encoded anew; its generator's log-probs are summed between bytes at which tokens of
both end, and so are ours. Capped as in truncated importance sampling, because a segment's ratio is a product over
tokens. Rollouts of our own tokenizer have token ratios. No benchmark supports it yet, hence no default: see
docs/recipes.md for its bias and `learner.recipe_text_only` for its use.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.segment import SegmentRatio
from swarm.objectives.parts.weight.surrogate import Surrogate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="segment_ratio",
    title="Correction across tokenizers",
    acronym="",
    arxiv="",
    verification="ours",
    advantage=GroupZScore(),
    ratio=SegmentRatio(cap=2.0),
    weight=Surrogate(),
    aggregate=TokenMean(),
)
