"""Advantages of a few responses against a larger pool of the same prompt.

Invariant: what is kept depends on rewards and order alone; what is not kept is dropped (NaN), never trained on.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart
from swarm.objectives.parts.groups import group_statistics, where_signal


def kept_of_pool(is_right: list[bool], keep: int) -> list[int]:
    """Places of the first right and the first wrong answers, half of each as far as there are any."""
    right = [place for place, each in enumerate(is_right) if each]
    wrong = [place for place, each in enumerate(is_right) if not each]
    num_right = min(keep // 2, len(right))
    num_wrong = min(keep - num_right, len(wrong))
    num_right = min(keep - num_wrong, len(right))
    return sorted(right[:num_right] + wrong[:num_wrong])


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOfPool(AdvantagePart):
    """Reward less the mean of all that were drawn, on a balanced few of them.

    The code counts right answers as 1 and wrong ones as 0 in that mean; with binary rewards it is the same.

    Source: Reinforce-Ada, arXiv:2510.04996; RLHFlow/Reinforce-Ada (`global_stat_est`, no division by the
    deviation, as in its script).
    """

    equation: ClassVar[str] = "A_i = R_i - mean of the pool, on keep/2 right and keep/2 wrong responses; the rest drop"
    keep: int = 4
    right: float = 0.7  # a reward above it counts as right

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise ConfigError(f"keep: {self.keep} responses have nothing to compare with")

    def __call__(self, batch: Batch) -> Tensor:
        pool = group_statistics(batch.rewards, batch.group_index)
        centred = where_signal(batch.rewards.to(pool.mean.dtype) - pool.mean, pool, batch.rewards)
        is_kept = torch.zeros_like(batch.rewards, dtype=torch.bool)
        for group in batch.group_index.unique().tolist():
            members = torch.nonzero(batch.group_index == group).flatten()
            is_right = (batch.rewards[members] > self.right).tolist()
            is_kept[members[kept_of_pool(is_right, self.keep)]] = True
        return torch.where(is_kept, centred, torch.nan)
