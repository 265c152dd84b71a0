"""CAMPO, its objective: responses that were cut off in a loop lose reward; clip-higher and token mean.

The other half of the method, a limit on length that grows over stages, is a setting of the run. The released
code takes a fixed penalty, where its scripts ask for a size that adapts and that it does not implement.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.reward.repetition import RepeatedTail
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="repeated_tail",
    title="MiroMind-M1: An Open-Source Advancement in Mathematical Reasoning via "
    "Context-Aware Multi-Stage Policy Optimization",
    acronym="CAMPO",
    arxiv="2507.14683",
    row="S117",
    verification="code",
    rewards=(RepeatedTail(penalty=0.1),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
