"""Advantages that only know right from wrong.

Invariant: no statistic of the group enters.
Shape letters: N rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement


@dataclass(frozen=True, kw_only=True, slots=True)
class SignWeights(AdvantagePart):
    """A fixed advantage for correct rollouts and another, negative, for the rest.

    Source: PSR, NSR and W-REINFORCE, arXiv:2506.01347; TianHongZXY/RLVR-Decomposed. The threshold is ours.
    """

    equation: ClassVar[str] = "A_i = positive if R_i > threshold else -negative"
    positive: float = 1.0
    negative: float = 1.0
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if min(self.positive, self.negative) < 0:
            raise ConfigError("positive and negative are sizes and must not be negative")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        wrong = torch.full_like(batch.rewards, -self.negative)
        return torch.where(batch.rewards > self.threshold, torch.full_like(wrong, self.positive), wrong)
