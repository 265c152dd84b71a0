"""GRPO as first published: the clipped surrogate with a k3 penalty to the frozen reference in the same mean.

Most later work sets the strength to 0 (recipe `grpo`). The R1 report uses 0.001.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.kl import KlPenalty
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="grpo_reference",
    title="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    acronym="GRPO",
    arxiv="2402.03300",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(KlPenalty(strength=0.04, estimator="k3", to="reference", mean="rollout"),),
)
