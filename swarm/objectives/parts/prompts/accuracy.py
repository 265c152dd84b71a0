"""Prompts chosen by a running mean of what they were rewarded.

Invariant: odds are positive and depend on nothing but the running means.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from swarm.errors import ConfigError
from swarm.objectives.part import Memory, PromptPart, Requirement
from swarm.objectives.parts.history import renewed


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianAccuracy(PromptPart):
    """Prompts that are answered right about half of the time are asked most.

    Source: GCS of FG-ExPO, arXiv:2605.11403: centre and start 0.5, width 0.35, pace 0.1. Ours: the bound on
    remembered prompts; a forgotten one starts anew.
    """

    equation: ClassVar[str] = (
        "P(q) ~ exp(-(p_q - center)^2 / (2 width^2)), p_q <- (1 - pace) p_q + pace mean_G R, from start"
    )
    center: float = 0.5
    width: float = 0.35
    pace: float = 0.1
    start: float = 0.5
    remembers: int = 4096  # prompts

    def __post_init__(self) -> None:
        if self.remembers < 1:
            raise ConfigError(f"remembers: {self.remembers} prompts are none")
        if self.width <= 0:
            raise ConfigError(f"width: {self.width} is not positive")
        if not (0 < self.pace <= 1 and 0 <= self.start <= 1):
            raise ConfigError("pace and start must lie in [0, 1], and pace not be 0")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REPEATED_PROMPTS})

    def initial(self) -> Memory:
        return {"accuracy": {}}

    def seen(self, memory: Memory, key: str, rewards: Sequence[float]) -> Memory:
        table = _accuracies(memory)
        mean = (1 - self.pace) * table.get(key, self.start) + self.pace * math.fsum(rewards) / len(rewards)
        return {"accuracy": renewed(table, {key: mean}, self.remembers)}

    def odds(self, memory: Memory, keys: Sequence[str]) -> list[float]:
        table = _accuracies(memory)
        gaps = (table.get(key, self.start) - self.center for key in keys)
        return [math.exp(-(gap**2) / (2 * self.width**2)) for gap in gaps]


def _accuracies(memory: Memory) -> Mapping[str, float]:
    return cast("Mapping[str, float]", memory["accuracy"])
