"""MiniRL: REINFORCE weighted by the whole ratio to the generator, gated by PPO's clip around the start of the update.

    (1/N) sum of -M min(pi_old/mu, 5) sg[pi/pi_old] A log pi, M by pi/pi_old beyond .8 or 1.27

The weight is mismatch times staleness, a constant; the gate drops tokens that a later update of the same batch
pushed out of the clip. Secondary: half-widths of .2 and .27 and the cut of the mismatch factor at 5 come from readings
of the paper; we have not checked its text. Replay of expert routing, the third ingredient, concerns mixture-of-experts
models and is left out.

Mechanism: sign gated decoupled.
"""

import torch
from torch import Tensor

from swarm.objectives.part import CorrectionPart, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import AgainstPolicy, GroupCentred, RolloutSum, TokenRatio, TruncatedMismatch
from swarm.objectives.parts.mismatch_correction import pushed
from swarm.objectives.parts.ratio import Against, log_ratio
from swarm.objectives.recipe import Recipe


class SignGate(AgainstPolicy, CorrectionPart):
    """Drops tokens whose ratio is already beyond the bound in the direction of the advantage: PPO's clip as a mask.

    The ratio may differ from the recipe's: by default its denominator is the policy at the start of the update, so
    that nothing is dropped if a batch gets a single update.
    """

    equation = "L_t <- M L_t, M = 0 if (A > 0, pi/pi_old > 1+high) or (A < 0, pi/pi_old < 1-low)"
    low: float = 0.2  # half-widths
    high: float = 0.27
    against: Against = "proximal"

    def __call__(self, scored: Scored) -> Tensor:
        ratio = log_ratio(scored.logprobs.detach(), self.denominator(scored), scored.mask).exp()
        return pushed(scored.advantages, ratio > 1 + self.high, ratio < 1 - self.low)


class DetachedRatio(WeightPart):
    """The whole ratio as a constant weight of the log-likelihood: the gradient of `Surrogate`, another loss value."""

    equation = "L_t = -sg[r] A log pi_t"

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded(-torch.exp(scored.log_ratio.detach()) * scored.advantages * scored.logprobs)


RECIPE = Recipe(
    name="minirl",
    title="Stabilizing Reinforcement Learning with LLMs: Formulation and Practices",
    acronym="MiniRL",
    arxiv="2512.01374",
    verification="secondary",  # `ppo_recompute` of sail-sg/Stable-RL
    advantage=GroupCentred(),
    ratio=TokenRatio(against="proximal"),
    weight=DetachedRatio(),
    corrections=(TruncatedMismatch(cap=5.0), SignGate(low=0.2, high=0.27)),
    aggregate=RolloutSum(),
)
