"""GRPO with a divergence to the reference that is unbiased off policy too: k3 times the ratio to the sampler.

    GRPO + .001 (pi/mu) k3, the ratio with its gradient, all in one mean over rollouts

DeepSeek-V3.2 combines the term with other measures (such as `opsm`). Ours: plain GRPO around the term, and the
strength, which the report sets by domain. Mechanism: unbiased reference.
"""

import torch
from torch import Tensor

from swarm.objectives.part import NotNegative, Requirement, Scope, Scored, TermPart
from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.parts.kl import Mean, Sampler, Target, difference, estimate, need_of, step_mean
from swarm.objectives.recipe import Recipe


class ImportanceKl(TermPart):
    """KL penalty by k3 times the ratio to the policy that sampled: unbiased in value and gradient, also off policy."""

    equation = "L += strength * mean_t (pi/pi_sampler) k3(D_t), D = log pi - log pi_to"
    scope = Scope.ROLLOUT
    strength: NotNegative = 0.001
    sampler: Sampler = "behavior"
    to: Target = "reference"
    mean: Mean = "token"

    @property
    def needs(self) -> frozenset[Requirement]:
        return need_of(self.to) | need_of(self.sampler)

    def __call__(self, scored: Scored) -> Tensor:
        ratio = torch.exp(difference(scored, self.sampler))  # the gradient is r k3 + r (1 - exp(-D)) = r D
        return self.strength * step_mean(ratio * estimate(difference(scored, self.to), "k3"), scored, self.mean)


RECIPE = Recipe(
    name="grpo_unbiased_kl",
    title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
    acronym="GRPO (unbiased KL)",
    arxiv="2512.02556",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(ImportanceKl(strength=0.001, sampler="behavior", to="reference", mean="rollout"),),
)
