"""PVPO: the baseline is the reference policy's mean reward on the prompt, measured beforehand, not the group's mean.

    A = R - mean reward of the reference policy on the prompt; clip .2, token mean

Groups whose rewards are all equal keep a signal, and two rollouts are enough. The paper's filter of prompts
by difficulty and the injected solutions of a larger model concern sampling and are not part of the objective.
Ours: clip and token mean.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_statistics, reference_rewards
from swarm.objectives.recipe import Recipe


class ReferenceAnchor(AdvantagePart):
    """Reward minus the mean reward of the reference policy's own responses to the prompt, taken beforehand."""

    equation = "A_i = R_i - mean_G(R_ref)"
    always_needs = frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        anchor = group_statistics(reference_rewards(batch), batch.group_index).mean
        return (batch.rewards.to(anchor.dtype) - anchor).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="pvpo",
    title="PVPO: Pre-Estimated Value-Based Policy Optimization for Agentic Reasoning",
    acronym="PVPO",
    arxiv="2508.21104",
    verification="secondary",
    advantage=ReferenceAnchor(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
