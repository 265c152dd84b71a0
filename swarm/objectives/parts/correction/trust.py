"""Trust regions as masks: tokens that moved too far are dropped, by the probability itself or by the ratio.

Invariant: a mask is 0 or 1 and carries no gradient. Dropped tokens stay in the denominators of the loss.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import CorrectionPart, Scope, Scored
from swarm.objectives.parts.correction.mismatch import MismatchPart, log_mismatch
from swarm.objectives.parts.ratio.token import Against, AgainstPolicy, log_ratio

PROBABILITY_FLOOR = 1e-8
"""Added to the probability of all other tokens, so that its logarithm is finite."""


def probability(logprobs: Tensor) -> Tensor:
    """[N, L] in [0, 1], constant; rounding over log 1 counts as 1."""
    return logprobs.detach().clamp(max=0).exp()


def pushed(advantages: Tensor, too_high: Tensor, too_low: Tensor) -> Tensor:
    """0 where a token is beyond the bound its advantage pushes it to, else 1: [N, L].

    Args:
        advantages: [N, L].
        too_high: bool [N, L], grown too much; counts where A > 0.
        too_low: bool [N, L], fallen too much; counts elsewhere.
    """
    return (~torch.where(advantages > 0, too_high, too_low)).to(advantages.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Divergence(AgainstPolicy, CorrectionPart):
    low: float = 0.15
    high: float = 0.15

    def __post_init__(self) -> None:
        AgainstPolicy.__post_init__(self)
        if min(self.low, self.high) < 0:
            raise ConfigError(f"low {self.low} and high {self.high} must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityDifferenceMask(_Divergence):
    """Drops tokens whose probability moved by more than a bound in the direction its advantage pushes to.

    Rare tokens may move by a large factor, frequent ones by little. `against` "proximal" is the recompute variant.

    Source: DPPO-Binary-TV, arXiv:2602.04879; sail-sg/Stable-RL; verl `dppo_tv`.
    """

    equation: ClassVar[str] = "L_t <- M L_t, M = 0 if (A > 0, p - p_mu > high) or (A <= 0, p - p_mu < -low)"

    def __call__(self, scored: Scored) -> Tensor:
        moved = probability(scored.logprobs) - probability(self.denominator(scored))
        return pushed(scored.advantages, moved > self.high, moved < -self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class BernoulliDivergenceMask(_Divergence):
    """Drops tokens by KL(mu || pi) of "this token or another", in the direction its advantage pushes to.

    Source: DPPO-Binary-KL, arXiv:2602.04879; sail-sg/Stable-RL; verl `dppo_kl`.
    """

    equation: ClassVar[str] = (
        "L_t <- M L_t, M = 0 if KL > high, A > 0, p > p_mu or KL > low, A <= 0, p < p_mu; "
        "KL = p_mu log(p_mu/p) + (1-p_mu) log((1-p_mu)/(1-p))"
    )

    def __call__(self, scored: Scored) -> Tensor:
        behavior = self.denominator(scored).clamp(max=0)
        current = scored.logprobs.detach().clamp(max=0)
        others = torch.log((PROBABILITY_FLOOR - torch.expm1(behavior)) / (PROBABILITY_FLOOR - torch.expm1(current)))
        divergence = behavior.exp() * (behavior - current) - torch.expm1(behavior) * others
        rises, falls = current > behavior, current < behavior
        return pushed(scored.advantages, rises & (divergence > self.high), falls & (divergence > self.low))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityBand(AgainstPolicy, CorrectionPart):
    """Drops tokens whose probability moved by more than a bound, in whichever direction.

    Source: prime-rl `ipo_loss_fn` (unrelated to the preference method of that name).
    """

    equation: ClassVar[str] = "L_t <- 1[|p - p_mu| <= width] L_t"
    width: float = 0.1

    def __post_init__(self) -> None:
        AgainstPolicy.__post_init__(self)
        if self.width < 0:
            raise ConfigError(f"width: {self.width} must not be negative")

    def __call__(self, scored: Scored) -> Tensor:
        moved = probability(scored.logprobs) - probability(self.denominator(scored))
        return (moved.abs() <= self.width).to(scored.advantages.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignGate(AgainstPolicy, CorrectionPart):
    """Drops tokens whose ratio left the bound its advantage pushes it to: PPO's clip as a mask.

    The ratio may be another one than the recipe's: here against the policy at the start of the update, so that
    nothing is dropped at the only update a batch gets.

    Source: MiniRL, arXiv:2512.01374; `ppo_recompute` of sail-sg/Stable-RL.
    """

    equation: ClassVar[str] = "L_t <- M L_t, M = 0 if (A > 0, pi/pi_old > 1+high) or (A < 0, pi/pi_old < 1-low)"
    low: float = 0.2  # half-widths
    high: float = 0.2
    against: Against = "proximal"

    def __call__(self, scored: Scored) -> Tensor:
        ratio = log_ratio(scored.logprobs.detach(), self.denominator(scored), scored.mask).exp()
        return pushed(scored.advantages, ratio > 1 + self.high, ratio < 1 - self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondMomentMask(MismatchPart):
    """Drops the step's tokens of largest mismatch until the mean square log-mismatch of the rest is in the budget.

    Equal squares are dropped together; the smallest one is always kept.

    Source: M2PO as in AReaL `_apply_m2po_masking`; arXiv:2510.01161.
    """

    equation: ClassVar[str] = "L_t <- M L_t, M drops the largest (log rho_t)^2 until mean_kept (log rho)^2 < budget"
    scope: ClassVar[Scope] = Scope.STEP
    budget: float = 0.04

    def __post_init__(self) -> None:
        if self.budget <= 0:
            raise ConfigError(f"budget: {self.budget} must be positive")

    def __call__(self, scored: Scored) -> Tensor:
        squares = log_mismatch(scored).to(torch.float64) ** 2
        ascending = squares[scored.mask].sort().values
        count = torch.arange(1, ascending.numel() + 1, dtype=torch.float64, device=ascending.device)
        num_kept = max(1, int((ascending.cumsum(dim=0) / count < self.budget).sum()))
        if num_kept >= ascending.numel():
            return torch.ones_like(scored.advantages)
        is_kept = (squares < ascending[num_kept]) | (squares == ascending[0])
        return is_kept.to(scored.advantages.dtype)
