"""Entropy band: EPO's entropy bonus, and a penalty where the entropy leaves a band around that of earlier steps.

    PG (token mean, dual clip 3) - .001 (mean H - weight .1 share outside (.8, 1.2) past H)

The penalty counts tokens, so it has no gradient: it changes the reported loss and no weight; only the bonus has an
effect. That follows from the released code; in the recipe `epo_band`, a variant of ours, the band pulls.

The paper is about agents of many turns: it keeps one history for each turn and applies the penalty in the later
half of them. This is its single-turn form, in which there is one history and the penalty always applies. The
released scripts open the band to 0 and 2; the code's defaults, 0.8 and 1.2, are here. Ours: a penalty of 0.1 on
both sides, where our notes on the code have 0.05 and 0.1.
"""

import math
from dataclasses import replace
from typing import Annotated

from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Bound, Memory, NotNegative, Scored, TermPart
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio, mean_entropy, step_mean
from swarm.objectives.recipe import Recipe


class EntropyBand(TermPart):
    """An entropy bonus, less a penalty for tokens whose entropy leaves a band around its history.

    The history is the mean over past steps of their mean entropy; before the first step there is no band. The weight
    of the penalty falls slowly to about 0.83 in the first half of `horizon` steps, then fast.
    """

    equation = "L -= strength * mean_t (H_t - weight(step) * penalty * 1[H_t outside (low, high) * past H])"
    strength: NotNegative = 0.001
    penalty: NotNegative = 0.1
    low: NotNegative = 0.8  # times the past mean entropy
    high: float = 1.2
    horizon: Annotated[int, Bound(at_least=2)] = 150  # updates until the weight's schedule ends (the code: epochs)
    slow: NotNegative = 2.0  # decay rate in the first half
    fast: NotNegative = 3.0  # in the second

    def check(self) -> None:
        if self.high < self.low:
            raise ConfigError(f"low: {self.low} is above high: {self.high}")

    def initial(self) -> Memory:
        return {"steps": 0, "entropy_sum": 0.0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        entropy = float(mean_entropy(scored).detach())
        return {"steps": int(memory["steps"]) + 1, "entropy_sum": float(memory["entropy_sum"]) + entropy}

    def weight(self, step: int) -> float:
        """Weight of the penalty after `step` steps, in (0, 1]."""
        half = self.horizon // 2
        step = min(step, self.horizon)
        if step <= half:
            return 1 - 0.2 * (1 - math.exp(-self.slow * step / half))
        return 0.8 * math.exp(-self.fast * (step - half) / (self.horizon - half))

    def outside(self, entropy: Tensor, past: float) -> Tensor:
        """Penalty [N, L] of each token's entropy, where the mean entropy of earlier steps was `past`; constant."""
        entropy = entropy.detach()
        return ((entropy <= self.low * past) | (entropy >= self.high * past)).to(entropy.dtype)

    def __call__(self, scored: Scored) -> Tensor:
        memory = self.remembered(scored.batch)
        bonus = mean_entropy(scored)
        if (steps := int(memory["steps"])) > 0:
            outside = self.outside(scored.entropy, float(memory["entropy_sum"]) / steps)
            bonus = bonus - self.weight(steps) * self.penalty * step_mean(outside, scored, "token")
        return -self.strength * bonus


class PullingBand(EntropyBand):
    """The bonus of `EntropyBand`, and a pull back into the band that grows with the distance to the band. Ours.

    If `penalty` exceeds 1 / weight, the pull outweighs the bonus above the band; below the band it adds to the bonus.
    """

    equation = (
        "L -= strength * mean_t (H_t - weight(step) * penalty * (max(low past H - H_t, 0) + max(H_t - high past H, 0)))"
    )
    penalty: NotNegative = 3.0

    def outside(self, entropy: Tensor, past: float) -> Tensor:
        return (self.low * past - entropy).clamp(min=0) + (entropy - self.high * past).clamp(min=0)


RECIPE = Recipe(
    name="epo",
    title="EPO: Entropy-regularized Policy Optimization for LLM Agents Reinforcement Learning",
    acronym="EPO",
    arxiv="2509.22576",
    verification="code",  # WujiangXu/EPO `verl/workers/actor/dp_actor.py`, every token a single turn
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2, dual=3.0),
    aggregate=TokenMean(),
    terms=(EntropyBand(),),
)

EPO_BAND = replace(
    RECIPE,
    name="epo_band",
    verification="ours",
    about="EPO with a band that pulls: outside it the penalty is the distance in nats, with gradient, and strong "
    "enough to turn the bonus around above it. The released band has no gradient, so its claim of a steadier "
    "entropy cannot come from it. Ours: the distance, and its strength of 3. Formula: EPO, a band that pulls: "
    "PG (token mean, dual clip 3) - .001 (mean H - weight 3 mean distance to (.8, 1.2) past H).",
    terms=(PullingBand(),),
)
