"""How much replayed rollouts count, by how far the run is.

Invariant: fresh rollouts always count 1.
Shape letters: N rollouts, L longest response in tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import CorrectionPart, Memory, Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayWarmup(CorrectionPart):
    """Rollouts of earlier policies count along half a cosine, from 0 at the start of the run to 1.

    Source: SPEAR, arXiv:2509.22601; TencentYoutuResearch/SPEAR `dp_actor.py` (`max_replay_loss_steps`).
    """

    equation: ClassVar[str] = "w = 1 at age 0, else (1 - cos(pi min(k / steps, 1))) / 2 at the k-th optimizer step"
    steps: int = 300  # optimizer steps

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps {self.steps} must be at least 1")

    def initial(self) -> Memory:
        return {"step": 1}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"step": int(memory["step"]) + 1}

    def __call__(self, scored: Scored) -> Tensor:
        step = int(self.remembered(scored.batch)["step"])
        weight = (1 - math.cos(math.pi * min(step / self.steps, 1.0))) / 2
        is_fresh = (scored.batch.age_steps == 0)[:, None].expand(scored.mask.shape)
        return torch.where(is_fresh, 1.0, torch.full_like(scored.log_ratio.detach(), weight))
