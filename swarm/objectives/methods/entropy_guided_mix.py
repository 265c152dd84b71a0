"""DHPO with entropy-guided mixing: uncertain tokens count by their own ratio, certain ones by the response's.

The text is not at hand. Ours: the share H/(H + 1 nat) of the token branch, its direction included, the intervals
of GRPO and GSPO, and that surrogate terms are mixed rather than ratios.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.branch import EntropyBranchClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="entropy_guided_mix",
    title="Orchestrating Tokens and Sequences: Dynamic Hybrid Policy Optimization for RLVR",
    acronym="DHPO-entropy",
    arxiv="2601.05607",
    row="S177",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=EntropyBranchClip(),
    aggregate=RolloutMean(),
)
