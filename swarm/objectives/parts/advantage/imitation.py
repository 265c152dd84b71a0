"""Self-imitation: what an old rollout is worth is judged by how well the policy does today.

Invariant: an old rollout is only ever pushed up; the history of group means is bounded.
Shape letters: N rollouts.
"""

import statistics
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Memory, Requirement, Scored
from swarm.objectives.parts.groups import group_statistics, where_signal


@dataclass(frozen=True, kw_only=True, slots=True)
class RecalibratedReplay(AdvantagePart):
    """Fresh rollouts against their group; old ones against the median of recent group means, if above it.

    Rollouts older than `max_age` optimizer steps get 0. While no mean is known yet, old ones get 0 too
    (ours). Only our own fresh groups say how well the policy does.

    Source: SPEAR, arXiv:2509.22601; TencentYoutuResearch/SPEAR `ray_trainer_hybrid.py`.
    """

    equation: ClassVar[str] = (
        "A_i = R_i - mean_G at age 0; max(R_i - median(recent group means), 0) at age 1..max_age; 0 beyond"
    )
    max_age: int = 5  # optimizer steps
    history: int = 10_240  # group means that are remembered

    def __post_init__(self) -> None:
        if self.max_age < 1 or self.history < 1:
            raise ConfigError("max_age and history must be at least 1")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})

    def initial(self) -> Memory:
        return {"means": []}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        batch = scored.batch
        group = group_statistics(batch.rewards, batch.group_index)
        is_own_fresh = (batch.age_steps == 0) & ~batch.is_external
        fresh = {
            int(index): float(mean)
            for index, mean, is_fresh in zip(batch.group_index, group.mean, is_own_fresh, strict=True)
            if is_fresh
        }
        return {"means": [*memory["means"], *fresh.values()][-self.history :]}

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        means = self.remembered(batch)["means"]
        today = statistics.median(means) if means else float("inf")
        own = where_signal(rewards - group.mean, group, rewards)
        replayed = torch.where(
            batch.age_steps <= self.max_age, (rewards - today).clamp(min=0), torch.zeros_like(rewards)
        )
        return torch.where(batch.age_steps == 0, own, replayed).to(batch.rewards.dtype)
