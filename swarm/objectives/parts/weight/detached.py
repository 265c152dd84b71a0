"""Detached weights: -sg[w] A log pi. Only the size of a token's gradient is bounded, never its direction.

Invariant: no gradient flows through a weight.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart

TRAJECTORY_BOUND = 80.0  # exp of it is finite in float32


def weighted_likelihood(scored: Scored, log_weight: Tensor, low: float | Tensor, high: float | Tensor) -> TokenLosses:
    """-sg[clip(w, low, high)] A log pi, with w = exp(log_weight).

    Args:
        scored: supplies log-probs and advantages.
        log_weight: [N, L], a sum of bounded log-ratios (exp must be finite).
        low: least weight, a number or [N, L].
        high: greatest weight.
    """
    weight = torch.exp(log_weight.detach())
    least, most = (torch.as_tensor(bound, dtype=weight.dtype, device=weight.device) for bound in (low, high))
    losses = -torch.clamp(weight, least, most) * scored.advantages * scored.logprobs
    return TokenLosses(losses=losses, bounded=(weight < least) | (weight > most))


def whole_trajectory(scored: Scored) -> Tensor:
    """Log of the product of a rollout's token ratios, [N, 1], detached, bounded so that exp is finite."""
    whole = scored.log_ratio.detach().double().sum(dim=1, keepdim=True)
    return whole.clamp(-TRAJECTORY_BOUND, TRAJECTORY_BOUND).to(scored.log_ratio.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood(WeightPart):
    """REINFORCE: the log-likelihood times the advantage, whatever the ratio.

    Source: Williams 1992, doi:10.1007/BF00992696.
    """

    equation: ClassVar[str] = "L_t = -A log pi_t"

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -scored.advantages * scored.logprobs
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperedLikelihood(WeightPart):
    """The log-likelihood times the advantage, damped by the strength of a pull to the previous policy.

    Source: OPMD, Trinity-RFT `opmd`; arXiv:2509.24203.
    """

    equation: ClassVar[str] = "L_t = -A log pi_t / (1 + tau)"
    tau: float = 1.0  # > -1

    def __post_init__(self) -> None:
        if self.tau <= -1:
            raise ConfigError(f"tau {self.tau} must exceed -1")

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -scored.advantages * scored.logprobs / (1 + self.tau)
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedClip(WeightPart):
    """The clipped ratio as a constant weight of the log-likelihood.

    Source: CISPO, arXiv:2506.13585 section 3.1; MinPRO, arXiv:2601.22718.
    """

    equation: ClassVar[str] = "L_t = -sg[clip(r, 1-low, 1+high)] A log pi_t"
    low: float = 1.0  # half-width; 1 = no lower bound
    high: float = 1.0  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        return weighted_likelihood(scored, scored.log_ratio, 1 - self.low, 1 + self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchoredLikelihood(WeightPart):
    """REINFORCE, and a squared log-ratio that pulls back to the ratio's denominator.

    Source: Kimi k1.5, arXiv:2501.12599 section 2.3.2, as a token loss in ROLL `kimi15`; arXiv:2509.24203.
    """

    equation: ClassVar[str] = "L_t = -A log pi_t + (tau/2) (log r)^2"
    tau: float = 0.1

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigError(f"tau {self.tau} must not be negative")

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -scored.advantages * scored.logprobs + self.tau / 2 * scored.log_ratio**2
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryClip(WeightPart):
    """The clipped ratio of the whole trajectory as a constant weight of each of its tokens.

    Wants a token ratio, which it multiplies up.

    Source: A-LoL, arXiv:2305.14718; abaheti95/LoL-RL.
    """

    equation: ClassVar[str] = "L_t = -sg[clip(prod_s r_s, 1-low, 1+high)] A log pi_t"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    low: float = 0.9  # half-width
    high: float = 0.9  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        return weighted_likelihood(scored, whole_trajectory(scored), 1 - self.low, 1 + self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBounds(WeightPart):
    """The clipped ratio as a constant weight, with bounds of their own for each sign of the advantage.

    Source: DISPO, arXiv:2602.00983 (two secondary sources agree).
    """

    equation: ClassVar[str] = "L_t = -sg[clip(r, 1-low, 1+high)] A log pi_t, (low, high) by the sign of A"
    positive_low: float = 0.2  # half-widths
    positive_high: float = 10.0
    negative_low: float = 1.0  # 1 = no lower bound
    negative_high: float = 100.0

    def __call__(self, scored: Scored) -> TokenLosses:
        is_positive = scored.advantages > 0
        bounds = torch.tensor(
            [[self.negative_low, self.negative_high], [self.positive_low, self.positive_high]],
            dtype=scored.log_ratio.dtype,
            device=scored.log_ratio.device,
        )[is_positive.long()]
        return weighted_likelihood(scored, scored.log_ratio, 1 - bounds[..., 0], 1 + bounds[..., 1])
