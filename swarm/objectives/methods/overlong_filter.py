"""DAPO with overlong filtering in place of its soft punishment: responses cut off by the limit are not learned from.

Ours: they stay in the denominator of the mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.finish import FinishedOnly
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

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
