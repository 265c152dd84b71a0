"""GRPO with a divergence to the reference that is unbiased off policy too: k3 times the ratio to the sampler.

DeepSeek-V3.2 has it with its other measures (`off_policy_sequence_mask` is one). Ours: GRPO alone as host, and
the strength, which the report sets by domain.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.kl import ImportanceKl
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="unbiased_reference",
    title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
    acronym="GRPO (unbiased KL)",
    arxiv="2512.02556",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(ImportanceKl(strength=0.001, sampler="behavior", to="reference", mean="rollout"),),
)
