"""GDPO: several rewards, each scored in its own group, added up with weights and whitened over the step.

A sum of rewards that is scored once makes unlike mixtures equal; here each reward keeps its say. Ours: the
clip around it; whitening is over tokens, as in the code that was read (the paper's is over rollouts).
"""

from swarm.objectives.parts.advantage.several import PerRewardScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="per_reward_normalised",
    title="GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    acronym="GDPO",
    arxiv="2601.05242",
    verification="code",
    advantage=PerRewardScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
