"""DAPO: the upper clip bound is wider than the lower, tokens count alike, overlong answers are penalised.

The objective and the reward of the method; its dynamic sampling (groups without signal are replaced) is the
sampler's work. The overlong buffer is 4096 of 20480 tokens; ours: the same share of each generator's limit.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.reward.length import Overlong
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="clip_higher",
    title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    acronym="DAPO",
    arxiv="2503.14476",
    verification="code",
    rewards=(Overlong(),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
