"""Repeated tail (CAMPO, its objective): responses that were cut off in a loop lose reward; clip-higher and token mean.

    R - .1 where cut off and the tail is a repeat; z-score, clip .2/.28, token mean

The other half of the method, a limit on length that grows over stages, is a setting of the run. The released
scripts ask for a penalty that adapts; the released code does not implement it and takes a fixed penalty.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.objectives.part import Batch, NotNegative, RewardPart
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """True if the tokens end in some sequence that occurs twice in a row."""
    backwards = tokens[::-1]
    total, start, end = len(backwards), 0, 0
    common = [0] * total  # length of the prefix shared with the whole, from each place on (Z-function)
    for place in range(1, total):
        if place < end:
            common[place] = min(end - place, common[place - start])
        while place + common[place] < total and backwards[common[place]] == backwards[place + common[place]]:
            common[place] += 1
        if place + common[place] > end:
            start, end = place, place + common[place]
        if common[place] >= place:
            return True
    return False


class RepeatedTail(RewardPart):
    """Subtracts a fixed penalty from responses that were cut off while they repeated themselves.

    Only cut-off responses are checked: a response that ended by itself may end in a repetition.
    """

    equation = "R <- R - penalty where the response was cut off and ends in a stretch repeated at once"
    penalty: NotNegative = 0.1

    def __call__(self, batch: Batch) -> Tensor:
        loops = [
            cut_off and ends_in_a_loop(batch.token_ids[rollout][batch.mask[rollout]].tolist())
            for rollout, cut_off in enumerate(batch.is_truncated.tolist())
        ]
        loops = torch.tensor(loops, dtype=torch.bool, device=batch.mask.device)
        return torch.where(loops, batch.rewards - self.penalty, batch.rewards)


RECIPE = Recipe(
    name="campo",
    title="MiroMind-M1: An Open-Source Advancement in Mathematical Reasoning via "
    "Context-Aware Multi-Stage Policy Optimization",
    acronym="CAMPO",
    arxiv="2507.14683",
    verification="code",  # MiroMindAsia/MiroMind-M1 `compute_campo_outcome_advantage`
    rewards=(RepeatedTail(penalty=0.1),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
