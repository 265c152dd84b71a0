"""Median baseline (MC-GRPO): the group's median is the baseline, its median absolute deviation the scale.

    A = (R - median) / (MAD or std + 1e-3) * members / nonzero members; clip .2, rollout mean

With few rollouts, one outlier shifts a mean and flips signs. The paper samples one rollout more and leaves the
median rollout out of the backward pass; here the median rollout has advantage 0. Ours: an even number of rollouts
uses the lower median, and the median rollout still counts in G and in the mean over rollouts; the two effects
cancel. An odd `generator.group_size` provides the extra rollout; the recipe does not draw it. For graded rewards:
with binary rewards a mean never flips a sign, while the median gives most rollouts advantage 0.
Ours: if more than half of a group agree, so that the deviation is 0, the group's standard deviation is the scale; the
released floor of 1e-3 alone gave advantages near 1000.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch
from swarm.objectives.parts import Clip, RolloutMean, TokenRatio
from swarm.objectives.parts.group_statistics import group_lower_median, group_statistics, group_sum, where_signal
from swarm.objectives.recipe import Recipe


class MedianDeviation(AdvantagePart):
    """Distance from the group's median in median absolute deviations, divided by the share of nonzero members."""

    equation = "A_i = (R_i - median_G) / ((MAD_G or std_G) + floor) * G / #{A != 0}"
    floor: float = 1e-3

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        centred = batch.rewards.to(group.mean.dtype) - group_lower_median(batch.rewards, batch.group_index)
        deviation = group_lower_median(centred.abs(), batch.group_index)
        scores = centred / (torch.where(deviation > 0, deviation, group.std) + self.floor)
        not_zero = group_sum((scores != 0).to(scores.dtype), batch.group_index)
        return where_signal(scores * group.count / not_zero.clamp(min=1), group, batch.rewards)


RECIPE = Recipe(
    name="mc_grpo",
    title="MC-GRPO: Median-Centered Group Relative Policy Optimization for Small-Rollout Reinforcement Learning",
    acronym="MC-GRPO",
    arxiv="2601.22582",
    verification="code",  # lotusroot-kim/MC-GRPO `grpo_trainer_gsm.py`
    advantage=MedianDeviation(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
