"""ST-PPO: a clip of turn-level ratios, the update divided by the size of the gradient that the clip removed.

As `clip_bias_normalised`, with the ratio of a whole turn. Ours besides the core: the half-widths,
which are those of AT2PO for the same ratio. Turns are those the environment marked.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.turn import TurnRatio
from swarm.objectives.parts.weight.bias import BiasNormalisedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="turn_clip_bias_normalised",
    title="ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training",
    acronym="ST-PPO",
    arxiv="2511.20718",
    row="S166",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TurnRatio(),
    weight=BiasNormalisedClip(low=3e-3, high=4e-3),
    aggregate=RolloutMean(),
)
