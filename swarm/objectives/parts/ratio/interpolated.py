"""A proximal policy that is never scored: between generator and policy, by the age of the data.

Invariant: the interpolation is a constant; age 0 puts it at the generator, great age at the policy itself.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import CorrectionPart, RatioPart, Requirement, Scored
from swarm.objectives.parts.ratio.token import log_ratio


def staleness(batch: Batch) -> Tensor:
    """alpha [N, 1] = (v_prox - v_mu)/(v_pi - v_mu) = age/(age + 1): the policy being made is one version ahead."""
    age = batch.age_steps.clamp(min=0).to(batch.rewards.dtype)
    return (age / (age + 1))[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class InterpolatedProximalRatio(RatioPart):
    """The ratio to a proximal policy between mu and pi, log-linear in their versions.

    Source: A-3PO, arXiv:2512.06547; AReaL `compute_prox_logp_approximations` (loglinear).
    """

    equation: ClassVar[str] = (
        "log r_t = d_t - sg[alpha d_t], d_t = clamp(log pi_t - log mu_t, -20, 20), alpha = age/(age+1)"
    )

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        drift = log_ratio(scored.logprobs, scored.behavior, scored.mask)
        return drift - staleness(scored.batch) * drift.detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class InterpolatedMismatch(CorrectionPart):
    """The weight of decoupled PPO at that proximal policy.

    Source: A-3PO, arXiv:2512.06547; AReaL `compute_prox_logp_approximations` (loglinear).
    """

    equation: ClassVar[str] = "L_t <- sg[exp(alpha d_t)] L_t, alpha = age/(age+1)"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BEHAVIOR_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        drift = log_ratio(scored.logprobs.detach(), scored.behavior, scored.mask)
        return (staleness(scored.batch) * drift).exp()
