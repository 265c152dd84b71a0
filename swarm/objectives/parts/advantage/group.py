"""Advantages from the rewards of the same group, linear in how far a reward is from the group's.

Invariant: a group whose rewards are all equal gets exactly 0, whatever the rounding of its mean.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart
from swarm.objectives.parts.groups import group_statistics, group_sum, where_signal


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCentred(AdvantagePart):
    """Reward minus the group's mean, not divided by anything.

    Source: Dr.GRPO, arXiv:2503.20783; verl `norm_adv_by_std_in_grpo=False`.
    """

    equation: ClassVar[str] = "A_i = R_i - mean_G"

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        return where_signal(batch.rewards.to(group.mean.dtype) - group.mean, group, batch.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOneOut(AdvantagePart):
    """Reward minus the mean reward of the other members; alone in its group, the reward itself.

    Source: RLOO, arXiv:2402.14740; verl `compute_rloo_outcome_advantage`.
    """

    equation: ClassVar[str] = "A_i = R_i - mean_{j != i} R_j; R_i in a group of one"

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        left_out = group.count / (group.count - 1).clamp(min=1) * (rewards - group.mean)
        return torch.where(group.count > 1, where_signal(left_out, group, rewards), rewards).to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanNormalised(AdvantagePart):
    """Distance from the group's mean in units of that mean: of a binary reward, weight 1 / success rate.

    Source: MaxRL, arXiv:2602.02710, as in prime-rl `max_rl`. Rewards are meant to be non-negative; the floor is ours.
    """

    equation: ClassVar[str] = "A_i = (R_i - mean_G) / (mean_G + floor)"
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        scores = (batch.rewards.to(group.mean.dtype) - group.mean) / (group.mean.clamp(min=0) + self.floor)
        return where_signal(scores, group, batch.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthWeightedBaseline(AdvantagePart):
    """Reward minus the group's mean weighted by response length, near the baseline of least variance.

    Source: OPO, arXiv:2505.23585; verl `compute_opo_outcome_advantage`.
    """

    equation: ClassVar[str] = "A_i = R_i - sum_j |o_j| R_j / sum_j |o_j|"

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        length = batch.length.to(rewards.dtype)
        baseline = group_sum(length * rewards, batch.group_index) / group_sum(length, batch.group_index).clamp(min=1)
        return where_signal(rewards - baseline, group, batch.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestOfGroup(AdvantagePart):
    """Only the best member has an advantage: its lead over the second best, in standard deviations.

    Of several equally good members none leads, so all get 0.

    Source: arXiv:2503.19595; verl `compute_grpo_passk_outcome_advantage`.
    """

    equation: ClassVar[str] = "A_best = (R_best - R_second) / (std_G + floor), 0 for all others"
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        is_best = rewards >= group.largest
        leads_alone = is_best & (group_sum(is_best.to(rewards.dtype), batch.group_index) == 1)
        below = torch.where(is_best, torch.full_like(rewards, -torch.inf), rewards)
        second = group_statistics(below, batch.group_index).largest
        lead = torch.where(leads_alone, rewards - second, torch.zeros_like(rewards))
        return where_signal(lead / (group.std + self.floor), group, batch.rewards)
