"""Whitened advantages whose outliers are not learned from.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlierFiltered(AdvantagePart):
    """The reward in standard deviations from the mean over the step's tokens; 0 beyond `limit` of them.

    Source: StableReinforce, arXiv:2505.02835; yfzhang114/r1_reward `replay_buffer.py`, which adds the mean
    before whitening to its limits (a slip: the whitened values have mean 0).
    """

    equation: ClassVar[str] = "z = (R_i - mean_tokens) / std_tokens (population); A = z if |z| <= limit else 0"
    limit: float = 3.0

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ConfigError(f"limit {self.limit} must be positive")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        rewards, length = batch.rewards.to(torch.float64), batch.length.to(torch.float64)
        if float(rewards.max()) == float(rewards.min()):
            return torch.zeros_like(batch.rewards)
        total = length.sum().clamp(min=1)
        centred = rewards - (length * rewards).sum() / total
        variance = (length * centred**2).sum() / total
        scores = centred / variance.clamp(min=1e-8).sqrt()
        return torch.where(scores.abs() <= self.limit, scores, torch.zeros_like(scores)).to(batch.rewards.dtype)
