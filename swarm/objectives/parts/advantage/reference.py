"""Advantages over the reference policy's value of the prompt, estimated from its own responses to it.

Invariant: the value does not look at the rollouts that are learned from.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.groups import group_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLead(AdvantagePart):
    """How far a reward exceeds the reference policy's mean reward; 0 where it does not.

    Source: A-LoL, arXiv:2305.14718 (there the value is a head trained on such responses).
    """

    equation: ClassVar[str] = "A_i = max(R_i - mean_G(R_ref), 0)"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        value = group_statistics(_reference_rewards(batch), batch.group_index).mean
        return (batch.rewards.to(value.dtype) - value).clamp(min=0).to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftValueLead(AdvantagePart):
    """Reward minus the optimal value of the KL-regularised problem, from the reference policy's responses.

    Source: A*-PO, arXiv:2505.20686; TRL experimental `a2po`.
    """

    equation: ClassVar[str] = "A_i = R_i - V, V = temperature log mean_G exp(R_ref / temperature)"
    temperature: float = 0.5

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature} must be positive")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        scaled = _reference_rewards(batch).to(torch.float64) / self.temperature
        largest = group_statistics(scaled, batch.group_index).largest
        mean = group_statistics(torch.exp(scaled - largest), batch.group_index).mean
        value = self.temperature * (largest + torch.log(mean))
        return (batch.rewards.to(value.dtype) - value).to(batch.rewards.dtype)


def _reference_rewards(batch: Batch) -> Tensor:
    assert batch.reference_rewards is not None, "the run does not supply reference_rewards"
    return batch.reference_rewards
