"""GRPO: group-relative advantages in a clipped surrogate, mean over rollouts.

    (1/N) sum_i (1/|o_i|) sum_t -min(r A, clip(r, .8, 1.2) A), r = pi/mu

With fresh, exact data every ratio is 1 and the gradient is that of REINFORCE with A.
verl adds 1e-6 to the standard deviation and TRL 1e-4; both use the unbiased one. The original has a KL
term to a reference policy, which both frameworks leave off by default, and so do we.
"""

from dataclasses import replace

from swarm.objectives.parts import Clip, GroupZScore, KlPenalty, RolloutMean, TokenRatio
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

GRPO_KL = replace(
    RECIPE,
    name="grpo_kl",
    about="Grpo reference (GRPO as first published): the clipped surrogate with a k3 penalty to the frozen "
    "reference in the same mean. Most later work sets the strength to 0 (recipe `grpo`). The R1 report uses "
    "0.001. Formula: rollout mean of -min(r A, clip(r, .8, 1.2) A) + .04 k3, k3 = exp(-D) + D - 1.",
    terms=(KlPenalty(strength=0.04, estimator="k3", to="reference", mean="rollout"),),
)
