"""Advantages from the rewards of the same group.

Invariant: a group whose rewards are all equal gets exactly 0, whatever the rounding of its mean.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.learn.batch import Batch
from swarm.learn.part import AdvantagePart
from swarm.parts.groups import group_statistics, where_signal


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupZScore(AdvantagePart):
    """Reward in standard deviations from the group's mean; a group of one gets 0.

    Source: arXiv:2402.03300 section 4.1.2; verl `compute_grpo_outcome_advantage`.
    """

    equation: ClassVar[str] = "A_i = (R_i - mean_G) / (std_G + floor), unbiased std"
    floor: float = 1e-6  # 1e-6 (verl), 1e-4 (TRL), 1e-8 (swarm sampling)

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        scores = (batch.rewards.to(group.mean.dtype) - group.mean) / (group.std + self.floor)
        return where_signal(scores, group, batch.rewards)
