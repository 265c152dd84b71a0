"""ACE: a wrong answer is pushed down the harder, the more training has raised its likelihood.

    A_i <- A_i (1 + alpha softplus(c_i)) where A_i < 0,    c_i = log pi(o_i) - log pi_ref(o_i), summed over its tokens

Errors of exploration (c near 0) and errors that are becoming rarer (c < 0) change least; softplus did better than
ReLU. Secondary: the abstract has c, public readings of the paper the rest. Ours: alpha 1, as no source has the number,
c held at +-20 so that one long answer cannot dominate a step, and GRPO as the rest (the paper also adds it to DAPO).
"""

import torch
from torch import Tensor
from torch.nn import functional

from swarm.objectives.part import NotNegative, Requirement, Scope, Scored, ShapePart
from swarm.objectives.parts import LOG_RATIO_BOUND, Clip, GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.recipe import Recipe


class ConfidentErrors(ShapePart):
    """Scales up negative advantages, more for rollouts that became more likely relative to the reference policy."""

    equation = "A *= 1 + alpha log(1 + exp(c)) where A < 0, c = clamp(sum_t log pi_t/ref_t, -20, 20)"
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.REFERENCE_LOGPROBS})
    alpha: NotNegative = 1.0

    def __call__(self, scored: Scored) -> Tensor:
        gap = torch.where(scored.mask, scored.logprobs.detach() - scored.reference, 0.0)
        confidence = gap.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)  # [N, 1]
        grown = scored.advantages * (1 + self.alpha * functional.softplus(confidence))
        return torch.where(scored.advantages < 0, grown, scored.advantages)


RECIPE = Recipe(
    name="ace",
    title="Overconfident Errors Need Stronger Correction: Asymmetric Confidence Penalties for Reinforcement Learning",
    acronym="ACE",
    arxiv="2602.21420",
    verification="secondary",
    advantage=GroupZScore(),
    shapers=(ConfidentErrors(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
