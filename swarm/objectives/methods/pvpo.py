"""PVPO: the baseline is what the reference policy scored on the prompt beforehand, not the group's own mean.

Groups whose rewards are all equal keep a signal, and two rollouts are enough. The paper's filter of prompts
by difficulty, and its injected solutions of a larger model, are samplers and not part of the objective.
Ours: clip and token mean around it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.aggregate import TokenMean
from swarm.objectives.parts.clip import Clip
from swarm.objectives.parts.group_statistics import group_statistics
from swarm.objectives.parts.ratio import TokenRatio
from swarm.objectives.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceAnchor(AdvantagePart):
    """Reward minus the mean reward of the reference policy's own responses to the prompt, taken beforehand.

    Source: PVPO, arXiv:2508.21104.
    """

    equation: ClassVar[str] = "A_i = R_i - mean_G(R_ref)"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.reference_rewards is not None, "the run does not supply reference_rewards"
        anchor = group_statistics(batch.reference_rewards, batch.group_index).mean
        return (batch.rewards.to(anchor.dtype) - anchor).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="pvpo",
    title="PVPO: Pre-Estimated Value-Based Policy Optimization for Agentic Reasoning",
    acronym="PVPO",
    arxiv="2508.21104",
    row="S039",
    verification="secondary",
    advantage=ReferenceAnchor(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
