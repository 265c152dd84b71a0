"""Advantages in units of the whole step's spread.

Invariant: statistics are of the whole optimizer step; where nothing differs in it, all advantages are 0.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.groups import group_statistics, where_signal
from swarm.objectives.parts.ratio.token import log_ratio


def whitened(values: Tensor, mask: Tensor, floor: float) -> Tensor:
    """(value - mean) / sqrt(unbiased variance + floor) over `mask`, 0 where all values are equal.

    Args:
        values: float64, of the shape of `mask`.
        mask: bool.
        floor: of the variance.

    Source: verl `masked_whiten`.
    """
    kept = values[mask]
    if kept.numel() < 2 or float(kept.max()) == float(kept.min()):
        return torch.zeros_like(values)
    white = (values - kept.mean()) / (kept.var() + floor).sqrt()
    return torch.where(mask, white, torch.zeros_like(white))


@dataclass(frozen=True, kw_only=True, slots=True)
class WhitenedReturn(AdvantagePart):
    """Discounted return of every token, the reward at the last and a KL penalty at each, whitened over the step.

    The penalty compares the policy at the start of the update with the reference policy, both scored here: log-probs
    that a generator claims would let it write its own reward. At 0 neither is needed.

    Source: REINFORCE++, arXiv:2501.03262; verl `compute_reinforce_plus_plus_outcome_advantage`.
    """

    equation: ClassVar[str] = (
        "G_t = sum_{j>=t} gamma^(j-t) (R 1[j last] - kl clamp(log pi_old_j - log pi_ref_j, -20, 20)); A = whiten(G)"
    )
    gamma: float = 1.0
    kl: float = 0.01
    floor: float = 1e-8

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1 or self.kl < 0:
            raise ConfigError("gamma must be in (0, 1] and kl must not be negative")

    @property
    def needs(self) -> frozenset[Requirement]:
        every = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
        return every | {Requirement.PROXIMAL_LOGPROBS, Requirement.REFERENCE_LOGPROBS} if self.kl > 0 else every

    def __call__(self, batch: Batch) -> Tensor:
        is_later = batch.mask.flip(1).cumsum(dim=1).flip(1)  # trained tokens from here on
        is_last = batch.mask & (is_later == 1)
        rewards = torch.where(is_last, batch.rewards.to(torch.float64)[:, None], 0.0)
        if self.kl > 0:
            policy, reference = batch.proximal_logprobs, batch.reference_logprobs
            assert policy is not None and reference is not None, "the run does not supply what this part declares"
            rewards = rewards - self.kl * log_ratio(policy.to(torch.float64), reference.to(torch.float64), batch.mask)
        returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
        for place in reversed(range(rewards.shape[1])):
            is_trained = batch.mask[:, place]
            following = torch.where(is_trained, rewards[:, place] + self.gamma * following, following)
            returns[:, place] = following
        return whitened(returns, batch.mask, self.floor).to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhitenedGroupCentred(AdvantagePart):
    """Reward minus the group's mean, whitened over the tokens of the step.

    Source: REINFORCE++-baseline, arXiv:2501.03262; verl `compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """

    equation: ClassVar[str] = "A = whiten_tokens(R_i - mean_G)"
    floor: float = 1e-8

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # their zeros are in the variance

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(torch.float64)
        centred = where_signal(rewards - group.mean, group, rewards)
        return whitened(centred[:, None].expand(batch.mask.shape), batch.mask, self.floor).to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDeviation(AdvantagePart):
    """Reward minus the group's mean, in standard deviations of all rewards of the step.

    Source: Lite PPO, arXiv:2508.08221; ScaleRL, arXiv:2510.13786; TRL `scale_rewards="batch"`.
    """

    equation: ClassVar[str] = "A_i = (R_i - mean_G) / (std_batch + floor), unbiased std"
    floor: float = 1e-4  # TRL

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # their rewards are in the deviation

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(torch.float64)
        spread = rewards.std() if rewards.numel() > 1 else torch.zeros_like(rewards.sum())
        return where_signal((rewards - group.mean) / (spread + self.floor), group, batch.rewards)
