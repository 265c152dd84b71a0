"""Advantages that several methods share, by group and by step, and the shaped reward of overlong answers.

Invariant: where a group's mean is subtracted, several equal rewards give exactly 0, whatever the rounding of the mean;
statistics are those of the whole group or step, dropped members included.
Shape letters: N rollouts, L longest response in tokens.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, PositiveShare, Requirement, RewardPart
from swarm.objectives.parts.aggregate import allowed_length
from swarm.objectives.parts.group_statistics import (
    group_centred,
    group_left_out,
    group_scores,
    group_statistics,
    where_signal,
)
from swarm.objectives.parts.ratio import log_ratio
from swarm.objectives.parts.turns import is_finished


class GroupZScore(AdvantagePart):
    """Reward in standard deviations from the group's mean; a group of one gets 0.

    Source: arXiv:2402.03300 section 4.1.2; verl `compute_grpo_outcome_advantage`.
    """

    equation = "A_i = (R_i - mean_G) / (std_G + floor), unbiased std"
    floor: float = 1e-6  # 1e-6 (verl), 1e-4 (TRL), 1e-8 (swarm sampling)

    def __call__(self, batch: Batch) -> Tensor:
        return group_scores(batch.rewards, batch.group_index, self.floor)


class GroupCentred(AdvantagePart):
    """Reward minus the group's mean, not divided by anything.

    Source: Dr.GRPO, arXiv:2503.20783; verl `norm_adv_by_std_in_grpo=False`.
    """

    equation = "A_i = R_i - mean_G"

    def __call__(self, batch: Batch) -> Tensor:
        return group_centred(batch.rewards, batch.group_index)


class LeaveOneOut(AdvantagePart):
    """Reward minus the mean reward of the group's other members; in a group of one, the reward itself.

    Source: RLOO, arXiv:2402.14740; verl `compute_rloo_outcome_advantage`.
    """

    equation = "A_i = R_i - mean_{j != i} R_j; R_i in a group of one"

    def __call__(self, batch: Batch) -> Tensor:
        return group_left_out(batch.rewards, batch.group_index)


def whitened(values: Tensor, mask: Tensor, floor: float) -> Tensor:
    """(value - mean) / sqrt(unbiased variance + floor) over `mask`; 0 off the mask, and if all values are equal.

    Args:
        values: float64, of the shape of `mask`.
        mask: bool.
        floor: added to the variance.

    Source: verl `masked_whiten`.
    """
    kept = values[mask]
    if kept.numel() < 2 or float(kept.max()) == float(kept.min()):
        return torch.zeros_like(values)
    white = (values - kept.mean()) / (kept.var() + floor).sqrt()
    return torch.where(mask, white, torch.zeros_like(white))


class WhitenedReturn(AdvantagePart):
    """Discounted return of each token, whitened over the step: the reward is at the last token, a KL penalty at each.

    The penalty compares the policy at the start of the update with the reference policy, both scored here: log-probs
    that a generator claims would let the generator write its own reward. With `kl` 0, neither policy is needed.

    Source: REINFORCE++, arXiv:2501.03262; verl `compute_reinforce_plus_plus_outcome_advantage`.
    """

    equation = (
        "G_t = sum_{j>=t} gamma^(j-t) (R 1[j last] - kl clamp(log pi_old_j - log pi_ref_j, -20, 20)); A = whiten(G)"
    )
    gamma: PositiveShare = 1.0
    kl: NotNegative = 0.01
    floor: float = 1e-8

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


class BatchDeviation(AdvantagePart):
    """Reward minus the group's mean, in standard deviations of all rewards of the step.

    Source: Lite PPO, arXiv:2508.08221; ScaleRL, arXiv:2510.13786; TRL `scale_rewards="batch"`.
    """

    equation = "A_i = (R_i - mean_G) / (std_batch + floor), unbiased std"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # their rewards are in the deviation
    floor: float = 1e-4  # TRL

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(torch.float64)
        spread = rewards.std() if rewards.numel() > 1 else torch.zeros_like(rewards.sum())
        return where_signal((rewards - group.mean) / (spread + self.floor), group, batch.rewards)


def reference_rewards(batch: Batch) -> Tensor:
    """Rewards [N] of the reference policy's own responses, one for each rollout."""
    assert batch.reference_rewards is not None, "the run does not supply reference_rewards"
    return batch.reference_rewards


def own_rewards(batch: Batch, group: int) -> Tensor:
    """Rewards of a group of our own policy; empty for a group of another policy."""
    return batch.rewards[(batch.group_index == group) & ~batch.is_external]


class FinishedEpisodes(AdvantagePart):
    """Z-score of the reward in its group; an episode that a limit ended is dropped.

    Source: Mini-o3, arXiv:2509.07969 section 3.4, as quoted in a note on the paper.
    """

    equation = "A_i = z_i if i ended by itself, else dropped"
    always_needs = frozenset({Requirement.TURNS})
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        scores = group_scores(batch.rewards, batch.group_index, self.floor)
        return torch.where(is_finished(batch), scores, torch.full_like(scores, torch.nan))


class Overlong(RewardPart):
    """A penalty that grows over the last part of the allowed length, from 0 to `factor`.

    DAPO's buffer is 4096 of 20480 tokens. Here the buffer is a share of each rollout's allowed length.

    Source: DAPO, arXiv:2503.14476 section 3.4; verl `DAPORewardManager`.
    """

    equation = "R <- R + min(0, -factor (|o| - (Lmax - Lbuf)) / Lbuf), Lbuf = share Lmax"
    share: PositiveShare = 0.2
    factor: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        limit = allowed_length(batch).to(torch.float64)
        buffer = self.share * limit
        excess = (batch.length.to(torch.float64) - (limit - buffer)) / buffer
        return batch.rewards - (self.factor * excess.clamp(min=0)).to(batch.rewards.dtype)
