"""StableReinforce: ratios are held within far bounds before the clip, and outlying advantages are dropped.

A stability preset for noisy rewards. Its reward for consistency between reasoning and answer needs a judge
and is left out, as is the KL penalty in the reward. Ours: the reward itself is whitened, without a baseline.
"""

from swarm.objectives.parts.advantage.outlier import OutlierFiltered
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.preserving import PreClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="pre_clip",
    title="R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement Learning",
    acronym="StableReinforce",
    arxiv="2505.02835",
    row="S171",
    verification="code",
    advantage=OutlierFiltered(),
    ratio=TokenRatio(),
    weight=PreClip(),
    aggregate=RolloutMean(),
)
