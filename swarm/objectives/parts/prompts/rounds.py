"""Responses drawn in rounds until a prompt has given enough signal.

Invariant: a prompt gets at most `rounds` rounds of the group size and `largest` responses, whatever its rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from swarm.errors import ConfigError
from swarm.objectives.part import PromptPart, Requirement


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessiveElimination(PromptPart):
    """A prompt is answered again, a group at a time, until its answers are mixed enough.

    "balanced": half of what is kept is right and half wrong; "positive": one answer is right. All that were drawn
    form one group, so that every node can check and compare them; which of them are learned from is the
    advantage's choice (`KeptOfPool`).

    Source: Reinforce-Ada, arXiv:2510.04996 Algorithm 1; RLHFlow/Reinforce-Ada `verl/trainer/ppo/ray_trainer.py`.
    """

    equation: ClassVar[str] = "again while rounds < 4 and not (#right >= keep/2 and #wrong >= keep - keep/2)"
    rounds: int = 4
    keep: int = 4  # responses learned from
    right: float = 0.7  # a reward above it counts as right
    rule: Literal["balanced", "positive"] = "balanced"

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.keep < 2:
            raise ConfigError("rounds must be at least 1 and keep at least 2")
        if self.rule not in ("balanced", "positive"):
            raise ConfigError(f"rule: {self.rule!r} is neither 'balanced' nor 'positive'")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.VARIED_GROUPS})

    def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
        num_right = sum(reward > self.right for reward in rewards)
        num_wrong = len(rewards) - num_right
        if self.rule == "balanced":
            is_enough = num_right >= self.keep // 2 and num_wrong >= self.keep - self.keep // 2
        else:
            is_enough = num_right >= 1
        limit = min(self.rounds * group_size, largest)
        return 0 if is_enough else max(0, min(group_size, limit - len(rewards)))
