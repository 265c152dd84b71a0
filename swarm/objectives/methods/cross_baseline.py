"""POISE: the baseline is a linear probe on the policy's own states, taken from another rollout of the prompt.

No critic and no large group: two rollouts are enough, and because each is judged by the other's states the
gradient stays unbiased. Ours is the core: a few random directions of the states and running sums of a ridge
regression, where the paper has full states and a buffer, which would be too much to remember (see the part).
The advantage below only tells which foreign rollouts are negative.
"""

from swarm.objectives.parts.advantage.group import LeaveOneOut
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.shape.critic import CrossBaseline
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="cross_baseline",
    title="Your Language Model is Its Own Critic: Reinforcement Learning with Value Estimation "
    "from Actor's Internal States",
    acronym="POISE",
    arxiv="2605.07579",
    row="S150",
    verification="ours",
    advantage=LeaveOneOut(),
    shapers=(CrossBaseline(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
