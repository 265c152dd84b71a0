"""Baselines that are not the group's own mean, so that a group of equal rewards keeps a signal.

Invariant: where a baseline comes from outside the group, the part declares what the run must supply.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.groups import group_statistics, where_signal


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftedMean(AdvantagePart):
    """Reward minus a shifted group mean; below the mean, successes weigh more than failures.

    Source: AsymRE, arXiv:2506.20520; Trinity-RFT `asymre`.
    """

    equation: ClassVar[str] = "A_i = R_i - (mean_G + shift)"
    shift: float = -0.1

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        centred = where_signal(batch.rewards.to(group.mean.dtype) - group.mean, group, group.mean)
        return (centred - self.shift).to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualMaximum(AdvantagePart):
    """Z-score in the group together with one imagined member of full reward: groups that all fail go down.

    A group that has full reward throughout gets exactly 0.

    Source: NGRPO, arXiv:2509.18851; nangongrui-ngr/NGRPO.
    """

    equation: ClassVar[str] = "A_i = (R_i - mean') / (std' + floor), mean' and unbiased std' of {R_1..R_G, maximum}"
    maximum: float = 1.0
    floor: float = 1e-6

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        num_groups = int(batch.group_index.max()) + 1
        rewards = batch.rewards.to(torch.float64)
        imagined = torch.full((num_groups,), self.maximum, dtype=rewards.dtype, device=rewards.device)
        places = torch.arange(num_groups, device=rewards.device)
        group = group_statistics(torch.cat([rewards, imagined]), torch.cat([batch.group_index, places]))
        scores = where_signal((torch.cat([rewards, imagined]) - group.mean) / (group.std + self.floor), group, rewards)
        return scores[: rewards.shape[0]].to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyBaseline(AdvantagePart):
    """Reward minus the reward of the greedy response to the same prompt.

    Source: ReMax, arXiv:2310.10505; verl `compute_remax_outcome_advantage`.
    """

    equation: ClassVar[str] = "A_i = R_i - R(greedy response)"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BASELINE_ROLLOUT, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.baseline_rewards is not None, "the run does not supply baseline_rewards"
        return batch.rewards - batch.baseline_rewards.to(batch.rewards.dtype)[batch.group_index]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceMomentum(AdvantagePart):
    """Group z-score plus the bounded lead over the reference policy's response in the same place.

    Source: AAPO, arXiv:2505.14264; JianxXiong/AAPO.
    """

    equation: ClassVar[str] = "A_i = (R_i - mean_G) / (std_G + floor) + clip(R_i - Rref_i, -low, high)"
    low: float = 0.2
    high: float = 0.28
    floor: float = 1e-4

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.reference_rewards is not None, "the run does not supply reference_rewards"
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        scores = where_signal((rewards - group.mean) / (group.std + self.floor), group, rewards)
        lead = rewards - batch.reference_rewards.to(rewards.dtype)
        return (scores + lead.clamp(-self.low, self.high)).to(batch.rewards.dtype)
