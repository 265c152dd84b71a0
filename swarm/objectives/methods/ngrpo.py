"""NGRPO: z-scores with one imagined member of full reward, so that groups that all fail are pushed down.

    z-score with statistics of the group and one reward of 1; clip .16/.24, token mean

The clip bounds negatives more tightly: the lower half-width is the smaller one. Groups whose rewards are all
`maximum` have no signal; the paper drops them. Ours: the token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores
from swarm.objectives.recipe import Recipe


class VirtualMaximum(AdvantagePart):
    """Z-score in the group with one imagined member of reward `maximum`: groups that all fail get negative values."""

    equation = "A_i = (R_i - mean') / (std' + floor), mean' and unbiased std' of {R_1..R_G, maximum}"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    maximum: float = 1.0
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        num_groups = int(batch.group_index.max()) + 1
        rewards = batch.rewards.to(torch.float64)
        imagined = torch.full((num_groups,), self.maximum, dtype=rewards.dtype, device=rewards.device)
        places = torch.arange(num_groups, device=rewards.device)
        every, groups = torch.cat([rewards, imagined]), torch.cat([batch.group_index, places])
        return group_scores(every, groups, self.floor)[: rewards.shape[0]].to(batch.rewards.dtype)


RECIPE = Recipe(
    name="ngrpo",
    title="NGRPO: Negative-enhanced Group Relative Policy Optimization",
    acronym="NGRPO",
    arxiv="2509.18851",
    verification="code",  # nangongrui-ngr/NGRPO
    advantage=VirtualMaximum(maximum=1.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.16, high=0.24),
    aggregate=TokenMean(),
)
