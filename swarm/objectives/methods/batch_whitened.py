"""REINFORCE++: discounted returns with a KL penalty in the reward, whitened over all tokens of the step.

No group is needed: the baseline is the mean of the step. The penalty compares the generator with the
reference policy; its strength is ours (0 leaves both out).
"""

from swarm.objectives.parts.advantage.batch import WhitenedReturn
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="batch_whitened",
    title="REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    acronym="REINFORCE++",
    arxiv="2501.03262",
    verification="code",
    advantage=WhitenedReturn(gamma=1.0, kl=0.01),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
