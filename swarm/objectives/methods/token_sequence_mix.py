"""DHPO with averaged mixing: half GRPO's clipped token surrogate, half GSPO's, each in its own trust region.

The text is not at hand. Ours: equal shares, the intervals of GRPO and GSPO, and that surrogate terms are mixed
rather than ratios; share 1 is GRPO and share 0 is GSPO exactly.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.branch import BranchClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="token_sequence_mix",
    title="Orchestrating Tokens and Sequences: Dynamic Hybrid Policy Optimization for RLVR",
    acronym="DHPO",
    arxiv="2601.05607",
    row="S177",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BranchClip(),
    aggregate=RolloutMean(),
)
