"""Advantages whose centre or scale is not the group's mean and standard deviation of rewards.

Invariant: a group whose rewards are all equal gets exactly 0.
Shape letters: N rollouts, M groups.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.groups import GroupStatistics, group_lower_median, group_statistics, group_sum, where_signal

_MOST_WEIGHT = 1e6  # of 1 / density, as released
_SAME = 1e-9  # success rates that differ by less are equal but for rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianDeviation(AdvantagePart):
    """Distance from the group's median in median absolute deviations; zeros are made up for by the others.

    The median is that of a member, the lower one of an even number, so that the median rollout gets 0 and an
    unlucky outlier moves nobody's sign. Where more than half of a group agree the deviation is 0 and the
    floor alone sets the scale, as in the released code.

    Source: MC-GRPO, arXiv:2601.22582; lotusroot-kim/MC-GRPO `grpo_trainer_gsm.py`.
    """

    equation: ClassVar[str] = "A_i = (R_i - median_G) / (MAD_G + floor) * G / #{A != 0}"
    floor: float = 1e-3

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        centred = batch.rewards.to(group.mean.dtype) - group_lower_median(batch.rewards, batch.group_index)
        scores = centred / (group_lower_median(centred.abs(), batch.group_index) + self.floor)
        not_zero = group_sum((scores != 0).to(scores.dtype), batch.group_index)
        return where_signal(scores * group.count / not_zero.clamp(min=1), group, batch.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGroupScore(AdvantagePart):
    """Z-score with the mean and deviation over the group's tokens, each carrying its response's reward.

    Long responses pull the baseline to themselves. A group in which that gets any member to `limit` falls
    back to the ordinary z-score.

    Source: HAPO (token entropy); starriver030515/HAPO `compute_hapo_outcome_advantage`.
    """

    equation: ClassVar[str] = (
        "A_i = (R_i - mean_tokens) / (std_tokens + floor), population std; z-score if any |A| >= limit"
    )
    limit: float = 5.0
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards, length = batch.rewards.to(torch.float64), batch.length.to(torch.float64)
        tokens = group_sum(length, batch.group_index).clamp(min=1)
        centred = rewards - group_sum(length * rewards, batch.group_index) / tokens
        spread = (group_sum(length * centred**2, batch.group_index) / tokens).sqrt()
        scores = where_signal(centred / (spread + self.floor), group, rewards)
        is_far = group_sum((scores.abs() >= self.limit).to(rewards.dtype), batch.group_index) > 0
        plain = (rewards - group.mean) / (group.std + self.floor)
        return where_signal(torch.where(is_far, plain, scores), group, batch.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class BetaNormalised(AdvantagePart):
    """Reward minus success rate, weighed by a Beta distribution that follows the step's success rates.

    Rewards are mapped from [lowest, highest] to [0, 1]. Prompts whose rate is common in the step weigh less.
    Where all prompts have the same rate there is nothing to fit and the weight is 1 (ours).

    Source: BNPO, arXiv:2506.02864; changyi7231/BNPO `bnpo_ray_trainer.py`.
    """

    equation: ClassVar[str] = (
        "A_i = (R_i - p) / Beta(p; 1 + a/3, 1 + b/3), (a, b) of mean and variance of p over prompts"
    )
    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise ConfigError("lowest must be below highest")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # rates of 0 and 1 are part of the distribution

    def __call__(self, batch: Batch) -> Tensor:
        rewards = (batch.rewards.to(torch.float64) - self.lowest) / (self.highest - self.lowest)
        rewards = rewards.clamp(0, 1)
        group = group_statistics(rewards, batch.group_index)
        weight = (1 / self._density(group, batch.group_index)).clamp(max=_MOST_WEIGHT)
        return where_signal(weight * (rewards - group.mean), group, batch.rewards)

    def _density(self, group: GroupStatistics, group_index: Tensor) -> Tensor:
        rates = torch.zeros(int(group_index.max()) + 1, dtype=torch.float64, device=group_index.device)
        rates = rates.index_copy(0, group_index, group.mean)[group_index.unique()]  # [M]
        if rates.numel() < 2 or float(rates.max() - rates.min()) < _SAME:
            return torch.ones_like(group.mean)
        mean = rates.mean()
        evidence = mean * (1 - mean) / rates.var() - 1
        alpha, beta = ((1 + evidence * share / 3).clamp(min=1) for share in (mean, 1 - mean))
        normaliser = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        log_density = torch.xlogy(alpha - 1, group.mean) + torch.xlogy(beta - 1, 1 - group.mean)
        return torch.exp(normaliser + log_density)


@dataclass(frozen=True, kw_only=True, slots=True)
class UsefulGroups(AdvantagePart):
    """Z-score, shrunk in groups where even the longest success is not longer than the usual failure.

    Failures longer than `share` of what they were allowed count as cut off and not as failures. A group of
    one gets 0.

    Source: ADORA, arXiv:2602.10019; ShadeCloak/ADORA `core_algos.py` (its threshold is 4054 tokens).
    """

    equation: ClassVar[str] = (
        "A_i = z_i (1 if max |o| of R > correct exceeds mean |o| of the others below share Lmax, else damp)"
    )
    damp: float = 0.1
    correct: float = 0.5  # a success has a higher reward
    share: float = 0.95
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards, length = batch.rewards.to(torch.float64), batch.length.to(torch.float64)
        is_success = rewards > self.correct
        fails = ~is_success & (length < self.share * batch.max_new_tokens)
        success_length = torch.where(is_success, length, torch.full_like(length, -torch.inf))
        longest = group_statistics(success_length, batch.group_index).largest
        count = group_sum(fails.to(length.dtype), batch.group_index)
        usual = group_sum(torch.where(fails, length, 0.0), batch.group_index) / count.clamp(min=1)
        usual = torch.where(count > 0, usual, torch.full_like(usual, -torch.inf))
        scores = (rewards - group.mean) / (group.std + self.floor)
        return where_signal(torch.where(longest > usual, scores, self.damp * scores), group, batch.rewards)
