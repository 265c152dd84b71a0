"""Rewards that look at how long a response is.

Invariant: lengths are trained tokens before any member was dropped.
Shape letters: N rollouts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import Memory, Requirement, RewardPart, Scored
from swarm.objectives.parts.history import renewed


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlong(RewardPart):
    """A penalty that grows over the last part of the allowed length, from 0 to `factor`.

    DAPO's buffer is 4096 of 20480 tokens. Here it is a share of what each generator was allowed.

    Source: DAPO, arXiv:2503.14476 section 3.4; verl `DAPORewardManager`.
    """

    equation: ClassVar[str] = "R <- R + min(0, -factor (|o| - (Lmax - Lbuf)) / Lbuf), Lbuf = share Lmax"
    share: float = 0.2
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("share must be in (0, 1]")

    def __call__(self, batch: Batch) -> Tensor:
        limit = torch.maximum(batch.max_new_tokens, batch.length).to(torch.float64).clamp(min=1)
        buffer = self.share * limit
        excess = (batch.length.to(torch.float64) - (limit - buffer)) / buffer
        return batch.rewards - (self.factor * excess.clamp(min=0)).to(batch.rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryLength(RewardPart):
    """A bonus or malus by length against the shortest success this prompt ever had.

    As long as the record: 0. Half as long: +0.71. Twice as long or more: -1, but no less than `worst` for a
    success, so that it stays above every failure; a short failure gets no bonus. A prompt without a success
    so far adds nothing. Only successes of our own set the record: another node chooses which answers it sends.

    Source: HAPO (history-aware), arXiv:2505.11225; HCY123902/HAPO `utils.py` (cosine, shortest).
    """

    equation: ClassVar[str] = (
        "R <- R + weight l, c = cos(pi/2 min(|o|/h, 2)), l = max(worst, c) where R > correct else min(0, c), "
        "h = shortest success of the prompt"
    )
    weight: float = 1.0
    worst: float = -0.7
    correct: float = 0.5  # a success has a higher reward

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})

    def initial(self) -> Memory:
        return {"prompts": {}}

    def __call__(self, batch: Batch) -> Tensor:
        records: Mapping[str, int] = self.remembered(batch)["prompts"]
        shortest = torch.tensor(
            [records.get(batch.task_keys[group], 0) for group in batch.group_index.tolist()],
            dtype=torch.float64,
            device=batch.mask.device,
        )
        share = (batch.length.to(torch.float64) / shortest.clamp(min=1)).clamp(max=2.0)
        bonus = torch.cos(math.pi / 2 * share)
        bonus = torch.where(batch.rewards > self.correct, bonus.clamp(min=self.worst), bonus.clamp(max=0))
        bonus = torch.where(shortest > 0, bonus, torch.zeros_like(bonus))
        return batch.rewards + (self.weight * bonus).to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        batch = scored.batch
        known: Mapping[str, int] = memory["prompts"]
        outcomes = batch.rewards if batch.outcomes is None else batch.outcomes
        news: dict[str, int] = {}
        is_success = (outcomes > self.correct) & (batch.length > 0) & ~batch.is_external
        for place in is_success.nonzero()[:, 0].tolist():
            key, length = batch.task_keys[int(batch.group_index[place])], int(batch.length[place])
            news[key] = min(length, news.get(key, known.get(key, length)))
        return {"prompts": renewed(known, news)}
