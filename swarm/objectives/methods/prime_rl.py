"""prime-rl's default loss: DPPO's mask on an unclipped surrogate, and a pull of every token's ratio towards 1.

    token mean of -M r A + 1e-3 (log r)^2, M by p - p_mu beyond .2 where A pushes to

The squared log-ratio acts on dropped tokens too, so that they come back.

Mechanism: probability difference penalty.
"""

from dataclasses import replace

from torch import Tensor

from swarm.objectives.part import CorrectionPart, NotNegative, Scored, TermPart, masked_sum
from swarm.objectives.parts import (
    AgainstPolicy,
    GroupZScore,
    ProbabilityDifferenceMask,
    Surrogate,
    TokenMean,
    TokenRatio,
    probability,
)
from swarm.objectives.recipe import Recipe


class ProbabilityBand(AgainstPolicy, CorrectionPart):
    """Drops tokens whose probability moved by more than a bound, in either direction.

    Source: prime-rl `ipo_loss_fn` (unrelated to the preference method of that name).
    """

    equation = "L_t <- 1[|p - p_mu| <= width] L_t"
    width: NotNegative = 0.1

    def __call__(self, scored: Scored) -> Tensor:
        moved = probability(scored.logprobs) - probability(self.denominator(scored))
        return (moved.abs() <= self.width).to(scored.advantages.dtype)


class SquaredLogRatio(TermPart):
    """Penalty on the mean square of the log-ratio, which also pulls back the tokens that a mask drops.

    Source: Kimi K2.5, arXiv:2602.02276; prime-rl `default_loss_fn` (kl_tau 1e-3).
    """

    equation = "L += strength * sum_i sum_t (log r_t)^2 / sum_i |o_i|"
    strength: NotNegative = 1e-3

    def __call__(self, scored: Scored) -> Tensor:
        return self.strength * masked_sum(scored.log_ratio**2, scored.mask) / max(1, scored.batch.step_tokens)


RECIPE = Recipe(
    name="prime_rl",
    title="prime-rl: Async RL Training at Scale",
    acronym="DPPO+KL",
    url="https://github.com/PrimeIntellect-ai/prime-rl",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Surrogate(),
    corrections=(ProbabilityDifferenceMask(low=0.2, high=0.2),),
    aggregate=TokenMean(),
    terms=(SquaredLogRatio(strength=1e-3),),
)

PRIME_RL_IPO = replace(
    RECIPE,
    name="prime_rl_ipo",
    acronym="prime-rl IPO",
    about='Probability band (prime-rl\'s "ipo" loss): tokens whose probability moved by more than 0.1 in either '
    "direction are dropped. Otherwise as its default loss, `prime_rl`. Unrelated to the preference method "
    "IPO. Formula: token mean of -r A where |p - p_mu| <= .1, + 1e-3 (log r)^2 on every token.",
    corrections=(ProbabilityBand(width=0.1),),
)
