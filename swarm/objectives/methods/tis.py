"""TIS by token: a PPO loss around the policy at the start of the update, times that policy's ratio to mu, cut at 2.

    min(pi_old/mu, 2) on PPO's clip around pi_old, token mean

The correction multiplies any policy loss. Ours: GRPO's clip with a token mean as the host, cap 2 (verl advises
1.5 to 5, TRL has 3).
"""

from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio, TruncatedMismatch
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="tis",
    title="Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    acronym="TIS",
    url="https://fengyao.notion.site/off-policy-rl",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(TruncatedMismatch(cap=2.0),),
    aggregate=TokenMean(),
)
