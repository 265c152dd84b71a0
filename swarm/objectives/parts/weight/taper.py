"""TOPR: rewarded rollouts count fully, the others by their ratio, tapered into [low, high].

Invariant: weights are constants, so that no clip stops a gradient; a product of ratios is a float64 sum of their logs.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.weight.detached import weighted_likelihood, whole_trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class TaperedTrajectory(WeightPart):
    """A negative rollout weighs as much as its whole-trajectory ratio, a positive one is plain likelihood.

    Wants a token ratio, which it multiplies up. Bounds are of the ratio itself; positives have the
    canonical a+ = b+ = 1.

    Source: TOPR, arXiv:2503.14286 eq. 8.
    """

    equation: ClassVar[str] = "L_t = -A log pi_t if A > 0 else -sg[clip(prod_s r_s, low, high)] A log pi_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _check(self.low, self.high)

    def __call__(self, scored: Scored) -> TokenLosses:
        weight = torch.exp(whole_trajectory(scored))
        tapered = weight.clamp(self.low, self.high)
        is_positive = scored.advantages > 0
        losses = -torch.where(is_positive, 1.0, tapered) * scored.advantages * scored.logprobs
        return TokenLosses(losses=losses, bounded=~is_positive & ((weight < self.low) | (weight > self.high)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaperedToken(WeightPart):
    """Tokens of a rollout that scored count fully, those of the others by their own ratio.

    The split is by score, not by advantage; where it lies is ours, see the recipe.

    Source: ROLL `agentic_actor_pg_worker.py` (topr), Trinity-RFT `topr`.
    """

    equation: ClassVar[str] = "L_t = -A log pi_t if R > threshold else -sg[clip(r_t, low, high)] A log pi_t"
    low: float = 0.0
    high: float = 1.0
    threshold: float = 0.5  # a success has a higher reward

    def __post_init__(self) -> None:
        _check(self.low, self.high)

    def __call__(self, scored: Scored) -> TokenLosses:
        has_scored = (scored.batch.rewards > self.threshold)[:, None]
        log_weight = torch.where(has_scored, torch.zeros_like(scored.log_ratio), scored.log_ratio)
        low, high = (
            torch.where(has_scored, 1.0, torch.full_like(scored.log_ratio, bound)) for bound in (self.low, self.high)
        )
        return weighted_likelihood(scored, log_weight, low, high)


def _check(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ConfigError(f"low {low} and high {high}: 0 <= low <= high must hold")
