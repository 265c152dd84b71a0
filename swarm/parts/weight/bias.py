"""S-PPO: the update is divided by the size of what the clip removes from it.

Invariant: the size is one constant for the whole step, so that micro-batches share it.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.errors import ConfigError
from swarm.learn.part import Scope, Scored, TokenLosses, WeightPart
from swarm.parts.weight.clip import clip_surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasNormalisedClip(WeightPart):
    """PPO's clip, its gradient divided by the norm of the gradient that the clip removed.

    The paper takes the norm over all parameters, which costs a second backward pass. Ours: the norm of the
    removed coefficients of log pi, for which a token's gradient has the same size everywhere and no two
    tokens share a direction; and a floor, below which nothing is divided, so that an update is never
    enlarged. With floor 1 a step that removes little is plain PPO.

    Source: ST-PPO, arXiv:2511.20718, in public reviews and notes.
    """

    equation: ClassVar[str] = (
        "L_t = -min(r A, clip(r, 1-low, 1+high) A) / max(floor, ||C||), C_t = (1/|o_i|) 1[t clipped] r A"
    )
    scope: ClassVar[Scope] = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    floor: float = 1.0

    def __post_init__(self) -> None:
        if self.floor <= 0:
            raise ConfigError(f"floor {self.floor} must be positive")

    def __call__(self, scored: Scored) -> TokenLosses:
        found = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high)
        length = scored.mask.sum(dim=1, keepdim=True).clamp(min=1)
        pull = torch.exp(scored.log_ratio.detach()) * scored.advantages / length
        removed = torch.where(found.bounded & scored.mask, pull, torch.zeros_like(pull))
        size = max(self.floor, float(removed.double().norm()))
        return TokenLosses(losses=found.losses / size, bounded=found.bounded)
