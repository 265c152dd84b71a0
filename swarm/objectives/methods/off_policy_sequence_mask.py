"""OPSM: negative responses that the policy has already left behind are dropped; positives always count.

DeepSeek-V3.2 has it with its other measures; here it is on GRPO alone. Ours: that host. The limit 0.5 is TRL's
suggestion.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.correction.rejection import OffPolicySequenceMask
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

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
