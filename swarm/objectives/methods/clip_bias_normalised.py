"""S-PPO: PPO's clip, the update divided by the size of the gradient that the clip removed.

Very stale batches, of which the clip removes much, then count less. Known from reviews and notes only. Ours is
the core: the size is that of the removed coefficients, not of parameter gradients, and never enlarges an update; a
group z-score in place of the critic. The turn-level form is `turn_clip_bias_normalised`.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.bias import BiasNormalisedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="clip_bias_normalised",
    title="ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training",
    acronym="S-PPO",
    arxiv="2511.20718",
    row="S166",
    verification="ours",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BiasNormalisedClip(),
    aggregate=RolloutMean(),
)
