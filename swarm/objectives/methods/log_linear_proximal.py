"""A-3PO: decoupled PPO whose proximal policy is guessed from the age of the data instead of being scored.

The guess lies between generator and policy, log-linear in their versions: data of age 0 has the generator
itself as centre (no weight, an ordinary clip), old data nearly the policy (all weight, no clip). No extra
forward pass. Ours: the clip 0.2 and the token mean of `decoupled_clip`.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.interpolated import InterpolatedMismatch, InterpolatedProximalRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="log_linear_proximal",
    title="A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation",
    acronym="A-3PO",
    arxiv="2512.06547",
    verification="code",
    advantage=GroupZScore(),
    ratio=InterpolatedProximalRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(InterpolatedMismatch(),),
    aggregate=TokenMean(),
)
