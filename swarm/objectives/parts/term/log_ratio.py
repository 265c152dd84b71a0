"""Penalties on the recipe's own ratio.

Invariant: what is penalised is the log-ratio that the recipe formed, so it is bounded.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TermPart, masked_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredLogRatio(TermPart):
    """The mean square of the log-ratio: masked tokens are pulled back too.

    Source: Kimi K2.5, arXiv:2602.02276; prime-rl `default_loss_fn` (kl_tau 1e-3).
    """

    equation: ClassVar[str] = "L += strength * sum_i sum_t (log r_t)^2 / sum_i |o_i|"
    strength: float = 1e-3

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ConfigError(f"strength: {self.strength} must not be negative")

    def __call__(self, scored: Scored) -> Tensor:
        return self.strength * masked_sum(scored.log_ratio**2, scored.mask) / max(1, scored.batch.step_tokens)
