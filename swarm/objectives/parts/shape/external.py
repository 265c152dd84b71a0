"""Advantages of other nodes' rollouts, shaped by how the own policy sees them.

Invariant: own rollouts keep their advantages.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, ShapePart


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalNovelty(ShapePart):
    """Scales advantages of foreign tokens by how unlikely the policy finds them: what it knows is not learnt again.

    Source: RL-PLUS, arXiv:2508.00222; YihongDong/RL-PLUS `rlplus_core_alg.py`.
    """

    equation: ClassVar[str] = "A_t <- A_t (1 - sg[pi_t])^power on foreign tokens"
    power: float = 0.5

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ConfigError(f"power: {self.power} must be positive")

    def __call__(self, scored: Scored) -> Tensor:
        unlikely = -torch.expm1(scored.logprobs.detach().clamp(max=0))
        shaped = scored.advantages * unlikely**self.power
        return torch.where(scored.batch.is_external[:, None], shaped, scored.advantages)
