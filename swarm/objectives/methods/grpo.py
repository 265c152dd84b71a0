"""GRPO: group-relative advantages in a clipped surrogate, mean over rollouts.

With fresh, exact data every ratio is 1 and the gradient is that of REINFORCE with A.
verl adds 1e-6 to the standard deviation and TRL 1e-4; both use the unbiased one. The original has a KL
term to a reference policy, which both frameworks leave off by default, and so do we.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="grpo",
    title="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    acronym="GRPO",
    arxiv="2402.03300",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
