"""Novelty sharpened (XRPO's advantage): positive advantages grow for rollouts less likely than their group's mean.

    A + min(max(1 - exp(s - mean_G s), 0), A/2) where A > 0, s mean log pi; clip .2, token mean

The paper's rollout allocation and in-context seeding are not part of the objective. Ours: the strength and
the bound of the bonus, which our sources do not give, and the token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import NotNegative, Scope, Scored, ShapePart
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio, group_sum
from swarm.objectives.recipe import Recipe


class NoveltySharpening(ShapePart):
    """Raises positive advantages of rollouts less likely than their group's mean, to at most 1 + `bound` times."""

    equation = "A <- A + min(max(strength (1 - exp(s_i - mean_G s)), 0), bound A) where A > 0"
    scope = Scope.GROUP
    strength: NotNegative = 1.0
    bound: NotNegative = 0.5  # share of the advantage

    def __call__(self, scored: Scored) -> Tensor:
        count = scored.mask.sum(dim=1)
        mean_logprob = scored.logprobs.detach().double().sum(dim=1) / count.clamp(min=1)
        is_there = (count > 0).double()
        members = group_sum(is_there, scored.batch.group_index).clamp(min=1)
        usual = group_sum(mean_logprob * is_there, scored.batch.group_index) / members
        novelty = 1 - torch.exp((mean_logprob - usual).clamp(max=20.0))
        bonus = (self.strength * novelty).clamp(min=0).to(scored.advantages.dtype)[:, None]
        sharpened = scored.advantages + torch.minimum(bonus, self.bound * scored.advantages)
        return torch.where(scored.advantages > 0, sharpened, scored.advantages)


RECIPE = Recipe(
    name="xrpo",
    title="XRPO: Pushing the limits of GRPO with Targeted Exploration and Exploitation",
    acronym="XRPO",
    arxiv="2510.06672",
    verification="secondary",
    advantage=GroupZScore(),
    shapers=(NoveltySharpening(strength=1.0, bound=0.5),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
