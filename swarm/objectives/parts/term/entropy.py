"""Bonuses on the policy's entropy, and what steers their strength.

Invariant: gradient flows through `scored.entropy` only; strengths and switches are constants of a step.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Memory, Scope, Scored, TermPart, masked_sum


def mean_entropy(scored: Scored) -> Tensor:
    """Sum of the entropy of trained tokens over the tokens of the step: adds up over micro-batches."""
    return masked_sum(scored.entropy, scored.mask) / max(1, scored.batch.step_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus(TermPart):
    """A constant bonus on the mean entropy of trained tokens.

    Source: arXiv:1707.06347 eq. 9; verl `entropy_coeff`.
    """

    equation: ClassVar[str] = "L -= strength * mean_t H_t"
    strength: float = 0.001

    def __call__(self, scored: Scored) -> Tensor:
        return -self.strength * mean_entropy(scored)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveEntropy(TermPart):
    """A bonus that acts only while entropy is at or under a target, and grows for as long as it is.

    After each step its strength rises by `pace` where the entropy was at or under the target, and falls by as
    much where it was over. Ours: it never falls under 0.

    Source: Skywork-OR1, arXiv:2505.22312 section 4.
    """

    equation: ClassVar[str] = "L -= c * 1[mean H <= target] * mean_t H_t; then c += pace if mean H <= target else -pace"
    scope: ClassVar[Scope] = Scope.STEP
    start: float = 0.01
    pace: float = 0.005
    target: float = 0.2  # nats per token

    def __post_init__(self) -> None:
        if min(self.start, self.pace, self.target) < 0:
            raise ConfigError("start, pace and target must not be negative")

    def initial(self) -> Memory:
        return {"strength": self.start}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        step = self.pace if self._is_low(scored) else -self.pace
        return {"strength": max(0.0, float(memory["strength"]) + step)}

    def __call__(self, scored: Scored) -> Tensor:
        strength = float(self.remembered(scored.batch)["strength"]) if self._is_low(scored) else 0.0
        return -strength * mean_entropy(scored)

    def _is_low(self, scored: Scored) -> bool:
        return float(mean_entropy(scored).detach()) <= self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBand(TermPart):
    """An entropy bonus, less a penalty for tokens whose entropy leaves a band around its history.

    The history is the mean over past steps of their mean entropy; before the first step there is no band. As in
    the released code the penalty is a constant of the token, so it moves the loss and not the gradient. Its weight
    falls slowly to about 0.83 in the first half of `horizon` steps, then fast.

    Source: EPO, arXiv:2509.22576; WujiangXu/EPO `verl/workers/actor/dp_actor.py`, every token a single turn.
    """

    equation: ClassVar[str] = (
        "L -= strength * mean_t (H_t - weight(step) * penalty * 1[H_t outside (low, high) * past H])"
    )
    strength: float = 0.001
    penalty: float = 0.1
    low: float = 0.8  # times the past mean entropy
    high: float = 1.2
    horizon: int = 150  # optimizer updates until the weight's schedule ends (the code: epochs)
    slow: float = 2.0  # decay rate in the first half
    fast: float = 3.0  # in the second

    def __post_init__(self) -> None:
        if min(self.strength, self.penalty, self.low, self.slow, self.fast) < 0 or self.high < self.low:
            raise ConfigError("constants must not be negative, and low not above high")
        if self.horizon < 2:
            raise ConfigError(f"horizon: {self.horizon} steps have no two halves")

    def initial(self) -> Memory:
        return {"steps": 0, "entropy_sum": 0.0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        entropy = float(mean_entropy(scored).detach())
        return {"steps": int(memory["steps"]) + 1, "entropy_sum": float(memory["entropy_sum"]) + entropy}

    def weight(self, step: int) -> float:
        """Of the penalty after `step` steps, in (0, 1]."""
        half = self.horizon // 2
        step = min(step, self.horizon)
        if step <= half:
            return 1 - 0.2 * (1 - math.exp(-self.slow * step / half))
        return 0.8 * math.exp(-self.fast * (step - half) / (self.horizon - half))

    def __call__(self, scored: Scored) -> Tensor:
        memory = self.remembered(scored.batch)
        bonus = mean_entropy(scored)
        if (steps := int(memory["steps"])) > 0:
            past = float(memory["entropy_sum"]) / steps
            entropy = scored.entropy.detach()
            is_outside = (entropy <= self.low * past) | (entropy >= self.high * past)
            share = masked_sum(is_outside.to(bonus.dtype), scored.mask) / max(1, scored.batch.step_tokens)
            bonus = bonus - self.weight(steps) * self.penalty * share
        return -self.strength * bonus
