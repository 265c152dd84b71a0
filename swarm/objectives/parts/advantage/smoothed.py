"""Advantages that remember what the same prompt scored before.

Invariant: a visit is judged by what was known before it; only our own groups are remembered, and the oldest
prompts are forgotten.
Shape letters: N rollouts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Memory, Requirement, Scored
from swarm.objectives.parts.history import renewed

Record = list[float]
"""[visits, rewards, their mean, sum of squared deviations]."""


def _merged(record: Record, rewards: Tensor) -> Record:
    """The record after one more visit with these rewards."""
    visits, count, mean, squares = record
    new_count, new_mean = rewards.numel(), float(rewards.mean())
    new_squares = float(((rewards - new_mean) ** 2).sum())
    total = count + new_count
    shift = new_mean - mean
    squares = squares + new_squares + shift**2 * count * new_count / total
    return [visits + 1, total, mean + shift * new_count / total, squares]


def _scores(rewards: Tensor, mean: float, count: float, squares: float) -> Tensor:
    deviation = (squares / (count - 1)) ** 0.5 if count > 1 else 0.0
    return (rewards - mean) / deviation if deviation > 0 else torch.zeros_like(rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class CumulativeScore(AdvantagePart):
    """Two mixtures of this visit's z-score and the z-score among all rewards of the prompt; the smaller counts.

    At visit i the mixtures weigh (i-1)/i and 1/i, one way round and the other. A prompt whose rewards are all
    equal this time still learns from how they stand to earlier ones. Moments are those of all its rewards so
    far, this visit included.

    Source: DCPO, arXiv:2509.02333; lime-RL/DCPO `compute_dcpo_outcome_advantage`.
    """

    equation: ClassVar[str] = "A = the smaller of (i-1)/i z_now + (1/i) z_all and (1/i) z_now + (i-1)/i z_all, i visits"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})

    def initial(self) -> Memory:
        return {"prompts": {}}

    def __call__(self, batch: Batch) -> Tensor:
        advantages = torch.zeros(batch.num_rollouts, dtype=torch.float64, device=batch.mask.device)
        for members, rewards, before in _visits(batch, self.remembered(batch)["prompts"]):
            visits, count, mean, squares = _merged(before, rewards)
            _, own_count, own_mean, own_squares = _merged([0.0, 0.0, 0.0, 0.0], rewards)
            is_flat = float(rewards.max()) == float(rewards.min())
            now = torch.zeros_like(rewards) if is_flat else _scores(rewards, own_mean, own_count, own_squares)
            everything = now if visits == 1 else _scores(rewards, mean, count, squares)
            mostly_now = (visits - 1) / visits * now + everything / visits
            mostly_all = now / visits + (visits - 1) / visits * everything
            advantages[members] = torch.where(mostly_now.abs() < mostly_all.abs(), mostly_now, mostly_all)
        return advantages.to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        records: dict[str, Record] = {}
        known: Mapping[str, Record] = memory["prompts"]
        for index, key in enumerate(scored.batch.task_keys):
            rewards = _own(scored.batch, index).to(torch.float64)
            if rewards.numel():
                records[key] = _merged(records.get(key, known.get(key, [0.0, 0.0, 0.0, 0.0])), rewards)
        return {"prompts": renewed(known, records)}


def _own(batch: Batch, group: int) -> Tensor:
    """Rewards of a group of our own policy; none of another policy, which says nothing about ours."""
    return batch.rewards[(batch.group_index == group) & ~batch.is_external]


def _visits(batch: Batch, known: Mapping[str, Record]) -> Iterator[tuple[Tensor, Tensor, Record]]:
    """(places, rewards in float64, what was known of the prompt) of every group."""
    for index, key in enumerate(batch.task_keys):
        members = (batch.group_index == index).nonzero()[:, 0]
        if members.numel():
            yield members, batch.rewards[members].to(torch.float64), known.get(key, [0.0, 0.0, 0.0, 0.0])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTracker(AdvantagePart):
    """Reward minus the prompt's running mean over earlier visits; of a prompt not seen yet, the step's mean.

    The baseline does not depend on the rollouts it is taken from, so that one rollout for each prompt is
    enough.

    Source: reinforcement comparison, in Williams 1992, doi:10.1007/BF00992696, section 4.
    """

    equation: ClassVar[str] = "A_i = R_i - b(prompt), then b += rate (mean_G - b); b = mean of the step at first"
    rate: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"rate {self.rate} must be in (0, 1]")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})

    def initial(self) -> Memory:
        return {"prompts": {}}

    def __call__(self, batch: Batch) -> Tensor:
        known: Mapping[str, float] = self.remembered(batch)["prompts"]
        rewards = batch.rewards.to(torch.float64)
        usual = float(rewards.mean())
        baselines = [known.get(batch.task_keys[group], usual) for group in batch.group_index.tolist()]
        return (rewards - torch.tensor(baselines, dtype=torch.float64, device=rewards.device)).to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        known: Mapping[str, float] = memory["prompts"]
        news: dict[str, float] = {}
        for index, key in enumerate(scored.batch.task_keys):
            rewards = _own(scored.batch, index)
            if rewards.numel():
                mean = float(rewards.to(torch.float64).mean())
                before = news.get(key, known.get(key, mean))
                news[key] = before + self.rate * (mean - before)
        return {"prompts": renewed(known, news)}
