"""OPSM: negative responses that the policy has already left behind are dropped; positives always count.

DeepSeek-V3.2 has it with its other measures; here it is on GRPO alone. Ours: that host. The limit 0.5 is TRL's
suggestion.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import RolloutMean
from swarm.parts.correction.rejection import OffPolicySequenceMask
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="off_policy_sequence_mask",
    title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
    acronym="OPSM",
    arxiv="2512.02556",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(OffPolicySequenceMask(limit=0.5),),
    aggregate=RolloutMean(),
)
