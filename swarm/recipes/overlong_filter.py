"""DAPO with overlong filtering in place of its soft punishment: responses cut off by the limit are not learned from.

Ours: they stay in the denominator of the mean.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.correction.finish import FinishedOnly
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="overlong_filter",
    title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    acronym="DAPO (overlong filtering)",
    arxiv="2503.14476",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    corrections=(FinishedOnly(),),
    aggregate=TokenMean(),
)
