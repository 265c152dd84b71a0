"""LEAD: correctness and closeness to a target length, each scored in its group, in a proportion that adapts.

Target lengths come from the policy's own successes, and the proportion moves to the reward that is still
unsettled. Both sides of the target cost the same, as in the paper; the released default pays shorter ones.
The small KL penalty is left out, as in `grpo`. Ours: limits of the target as shares of the allowed length.
"""

from swarm.objectives.parts.advantage.length import LengthBalance
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="length_balance",
    title="LEAD: Length-Efficient Adaptive and Dynamic Reasoning for Large Language Models",
    acronym="LEAD",
    arxiv="2605.09806",
    row="S144",
    verification="code",
    advantage=LengthBalance(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
