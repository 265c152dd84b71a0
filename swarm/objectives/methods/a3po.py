"""A-3PO: decoupled PPO whose proximal policy is guessed from the age of the data instead of being scored.

    log pi_prox = log mu + age/(age+1) (log pi - log mu), constant; decoupled PPO, token mean

The guess lies between generator and policy, log-linear in their versions: for data of age 0 the centre is the
generator itself (no weight, an ordinary clip), for old data almost the policy (all weight, no clip). It takes no
extra forward pass. Ours: the clip 0.2 and the token mean of `decoupled_ppo`.

Mechanism: log linear proximal.
"""

from torch import Tensor

from swarm.objectives.part import Batch, CorrectionPart, RatioPart, Requirement, Scored
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, log_ratio
from swarm.objectives.recipe import Recipe


def staleness(batch: Batch) -> Tensor:
    """alpha [N, 1] = (v_prox - v_mu)/(v_pi - v_mu) = age/(age + 1): the policy in training is one version ahead."""
    age = batch.age_steps.clamp(min=0).to(batch.rewards.dtype)
    return (age / (age + 1))[:, None]


class InterpolatedProximalRatio(RatioPart):
    """The ratio to a proximal policy between mu and pi, log-linear in their versions."""

    equation = "log r_t = d_t - sg[alpha d_t], d_t = clamp(log pi_t - log mu_t, -20, 20), alpha = age/(age+1)"
    always_needs = frozenset({Requirement.BEHAVIOR_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        drift = log_ratio(scored.logprobs, scored.behavior, scored.mask)
        return drift - staleness(scored.batch) * drift.detach()


class InterpolatedMismatch(CorrectionPart):
    """The weight of decoupled PPO, pi_prox / mu, at the interpolated proximal policy."""

    equation = "L_t <- sg[exp(alpha d_t)] L_t, alpha = age/(age+1)"
    always_needs = frozenset({Requirement.BEHAVIOR_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        drift = log_ratio(scored.logprobs.detach(), scored.behavior, scored.mask)
        return (staleness(scored.batch) * drift).exp()


RECIPE = Recipe(
    name="a3po",
    title="A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation",
    acronym="A-3PO",
    arxiv="2512.06547",
    verification="code",  # AReaL `compute_prox_logp_approximations` (loglinear)
    advantage=GroupZScore(),
    ratio=InterpolatedProximalRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(InterpolatedMismatch(),),
    aggregate=TokenMean(),
)
