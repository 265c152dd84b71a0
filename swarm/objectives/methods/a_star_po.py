"""A*-PO: the scaled log-ratio to the reference policy is regressed onto the optimal advantage.

    (1/N) sum_i (b2 log(pi(y)/pi_ref(y)) - (R - V))^2, V = .5 log mean exp(R_ref / .5), b2 .001

The optimal value of a prompt is computed from the reference policy's own answers, sampled beforehand. There is no ratio
to the generator, so rollouts of any origin can be used; the paper uses one fresh answer for each prompt.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Positive, Requirement
from swarm.objectives.parts import ReferenceRatio, RolloutMean, TrajectoryRegression
from swarm.objectives.parts.advantage import reference_rewards
from swarm.objectives.parts.group_statistics import group_statistics
from swarm.objectives.recipe import Recipe


class SoftValueLead(AdvantagePart):
    """Reward minus the optimal value of the KL-regularised problem, from the reference policy's responses."""

    equation = "A_i = R_i - V, V = temperature log mean_G exp(R_ref / temperature)"
    always_needs = frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})
    temperature: Positive = 0.5

    def __call__(self, batch: Batch) -> Tensor:
        scaled = reference_rewards(batch).to(torch.float64) / self.temperature
        largest = group_statistics(scaled, batch.group_index).largest
        mean = group_statistics(torch.exp(scaled - largest), batch.group_index).mean
        value = self.temperature * (largest + torch.log(mean))
        return (batch.rewards.to(value.dtype) - value).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="a_star_po",
    title="Accelerating RL for LLM Reasoning with Optimal Advantage Regression",
    acronym="A*-PO",
    arxiv="2505.20686",
    verification="code",  # TRL experimental `a2po`
    advantage=SoftValueLead(),
    ratio=ReferenceRatio(),
    weight=TrajectoryRegression(scale=1e-3),
    aggregate=RolloutMean(),
)
