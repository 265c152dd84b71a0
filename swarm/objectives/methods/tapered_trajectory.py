"""TOPR, as its paper has it: negative rollouts weigh their trajectory's ratio, tapered into [0, 1].

Positives are pure likelihood, so only negatives need log-probs of the generator. There is no KL term.
The paper's baseline is a dial of the share of positives. Ours: the group's mean.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import RolloutSum
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.taper import TaperedTrajectory
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="tapered_trajectory",
    title="Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
    acronym="TOPR",
    arxiv="2503.14286",
    row="S155",
    verification="paper",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TaperedTrajectory(),
    aggregate=RolloutSum(),
)
