"""Early call (ASPO (tool use)): successes that call their tool earlier get a bounded bonus on the advantage itself.

    z + clip(-2 (p - mean p) / mean |o|, +-.7 |z|) for successes with a call at p; clip .2, token mean

Added to the reward, the bonus would be normalised away or let a wrong answer win; added to the advantage, it never
changes a sign. Ours: the call counts as at the end of the first turn that has one; clip and token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores, group_statistics, group_sum, turns_of
from swarm.objectives.recipe import Recipe


class EarlyCall(AdvantagePart):
    """Z-score; a success that called a tool also gets a bounded bonus or malus by the place of its first call."""

    equation = "A_i = z_i + clip(-strength (p_i - mean_G p) / mean_G |o|, -bound |z_i|, bound |z_i|)"
    always_needs = frozenset({Requirement.TURNS, Requirement.TOOL_CALLS})
    strength: float = 2.0
    bound: NotNegative = 0.7
    correct: float = 0.5  # a success has a higher reward
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.rewards.to(torch.float64)
        scores = group_scores(rewards, batch.group_index, self.floor)
        calls = turns_of(batch).calls > 0
        first = calls.int().argmax(dim=1, keepdim=True)  # turn of the first call
        place = (batch.mask & (batch.turn_ids <= first)).sum(dim=1).to(torch.float64)
        called = (batch.rewards > self.correct) & calls.any(dim=1)
        # ours: the usual place is that of the successes that called
        callers = group_sum(called, batch.group_index).clamp(min=1)
        usual = group_sum(torch.where(called, place, 0.0), batch.group_index) / callers
        length = group_statistics(batch.length, batch.group_index).mean.clamp(min=1)
        most = self.bound * scores.abs()
        bonus = torch.maximum(torch.minimum(-self.strength * (place - usual) / length, most), -most)
        return (scores + torch.where(called, bonus, 0.0)).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="aspo_tool_use",
    title="Understanding Tool-Integrated Reasoning",
    acronym="ASPO (tool use)",
    arxiv="2508.19201",
    verification="code",
    advantage=EarlyCall(strength=2.0, bound=0.7),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
