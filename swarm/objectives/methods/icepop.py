"""IcePop: tokens whose probabilities at generator and learner differ too much are dropped, the rest weighted.

    pi_old/mu where it is in [.5, 5], else 0, on PPO's clip around pi_old, token mean

Dropped tokens stay in the denominator. Ours: GRPO's clip with a token mean as the host.
"""

from torch import Tensor

from swarm.objectives.part import Scored, Share
from swarm.objectives.parts import Clip, GroupZScore, MismatchPart, TokenMean, TokenRatio
from swarm.objectives.parts.mismatch_correction import RatioAtMost, inside, log_mismatch
from swarm.objectives.recipe import Recipe


class MaskedMismatch(MismatchPart):
    """The ratio rho of each token as its factor; tokens with rho outside a band are dropped."""

    equation = "L_t <- sg[rho_t 1[low <= rho_t <= high]] L_t"
    low: Share = 0.5
    high: RatioAtMost = 5.0

    def __call__(self, scored: Scored) -> Tensor:
        return inside(log_mismatch(scored).exp(), self.low, self.high)


RECIPE = Recipe(
    name="icepop",
    title="Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    acronym="IcePop",
    arxiv="2510.18855",
    verification="code",  # TRL `token_mask`. AReaL's cap is the band [0, cap]
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(MaskedMismatch(low=0.5, high=5.0),),
    aggregate=TokenMean(),
)
