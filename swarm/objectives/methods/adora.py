"""Useful groups (ADORA): groups in which thinking longer did not help are damped to a tenth.

    z-score, times .1 unless longest success > mean failure below .95 limit; clip .2, token mean

A group is useful if its longest success is longer than its mean failure. The released threshold for failures that
were cut off is 4054 tokens; ours is a share of each generator's limit. Ours: clip and token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores, group_statistics, group_sum
from swarm.objectives.recipe import Recipe


class UsefulGroups(AdvantagePart):
    """Z-score, scaled by `damp` in groups whose longest success is not longer than the mean failure not cut off."""

    equation = "A_i = z_i (1 if max |o| of R > correct exceeds mean |o| of the others below share Lmax, else damp)"
    damp: float = 0.1
    correct: float = 0.5  # a success has a higher reward
    share: float = 0.95  # of the limit; longer failures count as cut off
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        rewards, length = batch.rewards.to(torch.float64), batch.length.to(torch.float64)
        is_success = rewards > self.correct
        fails = ~is_success & (length < self.share * batch.max_new_tokens)
        longest = group_statistics(torch.where(is_success, length, -torch.inf), batch.group_index).largest
        count, total = (group_sum(each, batch.group_index) for each in (fails, torch.where(fails, length, 0.0)))
        usual = torch.where(count > 0, total / count.clamp(min=1), -torch.inf)
        scores = group_scores(rewards, batch.group_index, self.floor)
        return torch.where(longest > usual, scores, self.damp * scores).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="adora",
    title="ADORA: Training Reasoning Models with Dynamic Advantage Estimation on Reinforcement Learning",
    acronym="ADORA",
    arxiv="2602.10019",
    verification="code",  # ShadeCloak/ADORA `core_algos.py` (its threshold is 4054 tokens)
    advantage=UsefulGroups(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
