"""Shaped rewards that several methods share.

Invariant: the shaped reward of a rollout depends on that rollout alone.
"""

import torch
from torch import Tensor

from swarm.objectives.part import Batch, PositiveShare, RewardPart
from swarm.objectives.parts.aggregate import allowed_length


class Overlong(RewardPart):
    """A penalty that grows over the last part of the allowed length, from 0 to `factor`.

    DAPO's buffer is 4096 of 20480 tokens. Here it is a share of what each generator was allowed.

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
