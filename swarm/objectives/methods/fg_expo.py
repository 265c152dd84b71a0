"""Half accuracy curriculum (FG-ExPO): prompts around half accuracy, and a KL penalty that tightens as accuracy grows.

    GRPO + .02 (tanh(mean R) + 1)/2 k3 to the reference, one mean over rollouts

At the published width the pull to the middle is mild: of prompts that are evenly spread over success rates, 58 % of
those drawn lie in [.25, .75], where an even draw has 50 %. The paper adds both to GRPO. Ours: GRPO's clip of 0.2 and
its mean over rollouts, also for the penalty.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from swarm.objectives.part import (
    Count,
    Memory,
    NotNegative,
    Positive,
    PositiveShare,
    PromptPart,
    Requirement,
    Scope,
    Scored,
    Share,
    TermPart,
)
from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.parts.kl import Mean, difference, estimate, step_mean
from swarm.objectives.parts.prompts import renewed
from swarm.objectives.recipe import Recipe


class GaussianAccuracy(PromptPart):
    """Asks most often the prompts whose accuracy is near `center`, by default one half."""

    equation = "P(q) ~ exp(-(p_q - center)^2 / (2 width^2)), p_q <- (1 - pace) p_q + pace mean_G R, from start"
    always_needs = frozenset({Requirement.REPEATED_PROMPTS})
    center: float = 0.5
    width: Positive = 0.35
    pace: PositiveShare = 0.1
    start: Share = 0.5
    remembers: Count = 4096  # prompts; ours

    def initial(self) -> Memory:
        return {"accuracy": {}}

    def seen(self, memory: Memory, key: str, rewards: Sequence[float]) -> Memory:
        table: Mapping[str, float] = memory["accuracy"]
        mean = (1 - self.pace) * table.get(key, self.start) + self.pace * math.fsum(rewards) / len(rewards)
        return {"accuracy": renewed(table, {key: mean}, self.remembers)}

    def odds(self, memory: Memory, keys: Sequence[str]) -> list[float]:
        table: Mapping[str, float] = memory["accuracy"]
        gaps = (table.get(key, self.start) - self.center for key in keys)
        return [math.exp(-(gap**2) / (2 * self.width**2)) for gap in gaps]


class AccuracyKl(TermPart):
    """k3 penalty to the reference, weak while the step's mean reward is low and stronger when it is high."""

    equation = "L += strength * (tanh(mean R) + 1)/2 * mean_t k3(log pi - log pi_ref)"
    scope = Scope.STEP
    always_needs = frozenset({Requirement.REFERENCE_LOGPROBS})
    strength: NotNegative = 0.02
    mean: Mean = "rollout"

    def __call__(self, scored: Scored) -> Tensor:
        accuracy = float(scored.batch.rewards.double().mean())
        weight = self.strength * (math.tanh(accuracy) + 1) / 2
        return weight * step_mean(estimate(difference(scored, "reference"), "k3"), scored, self.mean)


RECIPE = Recipe(
    name="fg_expo",
    title="FG-ExPO: Frontier-Guided Exploration-Prioritized Policy Optimization via Adaptive KL and "
    "Gaussian Curriculum",
    acronym="FG-ExPO",
    arxiv="2605.11403",
    verification="paper",  # GCS and AKL, with their constants
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
    terms=(AccuracyKl(strength=0.02, mean="rollout"),),
    prompts=GaussianAccuracy(),
)
