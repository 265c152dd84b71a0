"""Optimal tool calls (OTC-GRPO): a reward shrinks with the distance to the fewest calls of a success in the group.

    R <- R sin(f pi / 2n), f = 2nm / (m + n), m its calls, n the fewest of a success; R cos(m pi / (2m + 1)) at n = 0

The factor multiplies, so that a wrong answer gains nothing by fewer calls. Known from notes on the paper. Ours: the 1
in the cosine; a group without a success keeps its rewards; a reward above .5 is a success; clip and mean.
"""

import math

import torch
from torch import Tensor

from swarm.objectives.part import Batch, Positive, Requirement, RewardPart
from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TokenRatio, turns_of
from swarm.objectives.recipe import Recipe


class ToolEfficiency(RewardPart):
    """Multiplies rewards by the closeness of the number of tool calls to the fewest calls of a success of the group.

    Source: OTC, arXiv:2504.14870 section 3 (OTC-GRPO).
    """

    equation = (
        "R <- R e, e = sin(f pi / 2n), f = 2nm / (m + n), n = min calls of R > correct in G; "
        "n = 0: e = cos(m pi / (2m + smoothing)), 1 at m = 0"
    )
    always_needs = frozenset({Requirement.TURNS, Requirement.TOOL_CALLS})
    correct: float = 0.5  # a success has a higher reward
    smoothing: Positive = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        calls = turns_of(batch).calls.sum(dim=1).to(torch.float64)
        fewest = torch.full_like(calls, math.inf)
        for group in batch.group_index.unique().tolist():
            members = batch.group_index == group
            successes = calls[members & (batch.rewards > self.correct)]
            if successes.numel():
                fewest[members] = successes.min()
        near = 2 * fewest * calls / (calls + fewest)
        some = torch.sin(near * math.pi / (2 * fewest.clamp(min=1)))
        none = torch.cos(calls * math.pi / (2 * calls + self.smoothing))
        factor = torch.where(fewest == 0, none, some)
        return torch.where(fewest.isfinite(), batch.rewards * factor, batch.rewards).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="otc_po",
    title="OTC: Optimal Tool Calls via Reinforcement Learning",
    acronym="OTC-PO",
    arxiv="2504.14870",
    verification="secondary",
    rewards=(ToolEfficiency(),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
