"""History length (HAPO (history-aware)): a reward for being shorter than the prompt's shortest success so far.

    R + l with the cosine of |o|/h, h the shortest success of the prompt; z-score, clip .2, rollout mean

The shortest success is remembered by prompt over the run, so that the pressure on length follows proven lengths;
failures get no bonus for being short. The repetition penalty, off in the released script, is left out. Ours: the
group z-score, clip and rollout mean of `grpo`.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.objectives.part import Batch, Memory, Requirement, RewardPart, Scored
from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TokenRatio, renewed
from swarm.objectives.recipe import Recipe


class HistoryLength(RewardPart):
    """Adds a bonus or malus by the response's length relative to the shortest remembered success of the prompt.

    With `weight` 1, a response as long as the record gets 0, one half as long +0.71, one twice as long or more -1. A
    success loses at most `worst`, which keeps it above failures; a failure gets no bonus. Without a success of the
    prompt so far the reward is unchanged. Only successes of our own policy set the record, because other nodes
    choose which answers they send.
    """

    equation = (
        "R <- R + weight l, c = cos(pi/2 min(|o|/h, 2)), l = max(worst, c) where R > correct else min(0, c), "
        "h = shortest success of the prompt"
    )
    always_needs = frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})
    weight: float = 1.0
    worst: float = -0.7
    correct: float = 0.5  # a success has a higher reward

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


RECIPE = Recipe(
    name="hapo_history",
    title="HAPO: Training Language Models to Reason Concisely via History-Aware Policy Optimization",
    acronym="HAPO (history-aware)",
    arxiv="2505.11225",
    verification="code",  # HCY123902/HAPO `utils.py` (cosine, shortest)
    rewards=(HistoryLength(weight=1.0, worst=-0.7),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
