"""Divergence penalties whose strength is steered by accuracy, by time or by the divergence itself.

Invariant: what steers a strength is a constant of the step; gradient flows through the divergence only.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Memory, Requirement, Scope, Scored, TermPart
from swarm.objectives.parts.term.kl import (
    Estimator,
    Mean,
    check_choice,
    check_not_negative,
    difference,
    estimate,
    need_of,
    step_mean,
)

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyKl(TermPart):
    """k3 to the reference, loose while the step's mean reward is low and tight where it is high.

    Source: AKL of FG-ExPO, arXiv:2605.11403.
    """

    equation: ClassVar[str] = "L += strength * (tanh(mean R) + 1)/2 * mean_t k3(log pi - log pi_ref)"
    scope: ClassVar[Scope] = Scope.STEP
    strength: float = 0.02
    mean: Mean = "rollout"

    def __post_init__(self) -> None:
        check_not_negative(strength=self.strength)
        check_choice("mean", self.mean, ("token", "rollout"))

    @property
    def needs(self) -> frozenset[Requirement]:
        return need_of("reference")

    def __call__(self, scored: Scored) -> Tensor:
        accuracy = float(scored.batch.rewards.double().mean())
        weight = self.strength * (math.tanh(accuracy) + 1) / 2
        return weight * step_mean(estimate(difference(scored, "reference"), "k3"), scored, self.mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvexKl(TermPart):
    """Penalties to the reference and to the policy at the start of the update, the share moving with the steps.

    Source: KL-convex of ReMix, arXiv:2507.06892. Ours: strength, estimator, and that updates are counted.
    """

    equation: ClassVar[str] = (
        "L += strength * mean_t (w k(pi||pi_ref) + (1-w) k(pi||pi_old)), "
        "w = max(1 - pace ceil(max(t-hold,0)/every), least)"
    )
    scope: ClassVar[Scope] = Scope.ROLLOUT
    strength: float = 0.001
    hold: int = 50  # optimizer updates with the reference alone
    every: int = 10  # updates
    pace: float = 0.1
    least: float = 0.5  # of the reference's share
    estimator: Estimator = "k3"
    mean: Mean = "rollout"

    def __post_init__(self) -> None:
        check_not_negative(strength=self.strength, hold=self.hold, pace=self.pace, least=self.least)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_choice("mean", self.mean, ("token", "rollout"))
        if self.every < 1 or self.least > 1:
            raise ConfigError("every must be at least 1 and least at most 1")

    @property
    def needs(self) -> frozenset[Requirement]:
        return need_of("reference") | need_of("proximal") | {Requirement.SEVERAL_UPDATES}

    def initial(self) -> Memory:
        return {"steps": 0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"steps": int(memory["steps"]) + 1}

    def share(self, steps: int) -> float:
        """Of the reference, after so many steps."""
        return max(1 - self.pace * math.ceil(max(steps - self.hold, 0) / self.every), self.least)

    def __call__(self, scored: Scored) -> Tensor:
        share = self.share(int(self.remembered(scored.batch)["steps"]))
        to_reference = estimate(difference(scored, "reference"), self.estimator)
        to_proximal = estimate(difference(scored, "proximal"), self.estimator)
        return self.strength * step_mean(share * to_reference + (1 - share) * to_proximal, scored, self.mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorKl(TermPart):
    """The proximal term of mirror descent: the divergence from the policy at the start of the update.

    Its strength 1/t_k grows from 1 without bound as t_k = 1 - k/horizon falls; ours: it stays where step
    `horizon - 1` left it. Estimated by `k3+`, whose gradient is that of the reverse KL.

    Source: Mirror Descent Policy Optimization, arXiv:2005.09814 section 4.1.
    """

    equation: ClassVar[str] = "L += (1 / t_k) * mean_t k(log pi - log pi_old), t_k = 1 - k/horizon after k steps"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    horizon: int = 1000  # optimizer updates of the run
    estimator: Estimator = "k3+"
    mean: Mean = "token"

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_choice("mean", self.mean, ("token", "rollout"))
        if self.horizon < 1:
            raise ConfigError(f"horizon: {self.horizon} is not positive")

    @property
    def needs(self) -> frozenset[Requirement]:
        return need_of("proximal") | {Requirement.SEVERAL_UPDATES}

    def initial(self) -> Memory:
        return {"steps": 0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"steps": min(int(memory["steps"]) + 1, self.horizon - 1)}

    def __call__(self, scored: Scored) -> Tensor:
        steps = min(int(self.remembered(scored.batch)["steps"]), self.horizon - 1)
        gap = estimate(difference(scored, "proximal"), self.estimator)
        return step_mean(gap, scored, self.mean) / (1 - steps / self.horizon)


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConstraint(TermPart):
    """No penalty while the divergence from the start of the update is within a bound, a steep one beyond.

    Source: DRPO, Optimization-AI/DRPO.
    """

    equation: ClassVar[str] = "L += sg[max(steepness (KL - bound), 0)] KL, KL = mean_t (log pi_old - log pi)"
    scope: ClassVar[Scope] = Scope.STEP
    steepness: float = 1000.0
    bound: float = 1e-4  # nats per token

    def __post_init__(self) -> None:
        check_not_negative(steepness=self.steepness)

    @property
    def needs(self) -> frozenset[Requirement]:
        return need_of("proximal")

    def __call__(self, scored: Scored) -> Tensor:
        divergence = step_mean(-difference(scored, "proximal"), scored, "token")
        return (self.steepness * (divergence.detach() - self.bound)).clamp(min=0) * divergence
