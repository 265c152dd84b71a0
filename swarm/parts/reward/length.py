"""Rewards that look at how long a response is.

Invariant: lengths are trained tokens before any member was dropped.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.batch import Batch
from swarm.learn.part import RewardPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlong(RewardPart):
    """A penalty that grows over the last part of the allowed length, from 0 to `factor`.

    DAPO's buffer is 4096 of 20480 tokens. Here it is a share of what each generator was allowed.

    Source: DAPO, arXiv:2503.14476 section 3.4; verl `DAPORewardManager`.
    """

    equation: ClassVar[str] = "R <- R + min(0, -factor (|o| - (Lmax - Lbuf)) / Lbuf), Lbuf = share Lmax"
    share: float = 0.2
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("share must be in (0, 1]")

    def __call__(self, batch: Batch) -> Tensor:
        limit = torch.maximum(batch.max_new_tokens, batch.length).to(torch.float64).clamp(min=1)
        buffer = self.share * limit
        excess = (batch.length.to(torch.float64) - (limit - buffer)) / buffer
        return batch.rewards - (self.factor * excess.clamp(min=0)).to(batch.rewards.dtype)
