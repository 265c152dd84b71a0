"""Information by feedback (InfoPO): a bonus for turns whose feedback moves the next turn, gated by equal outcomes.

    A = z_G(R) + .1 sigmoid(-std_G(R) / .05) z(s_k / |a_k|), s_k = mean log pi(a_{k+1} | answer k) - log pi(.. | none)

The answer k is the environment's feedback to turn k. The second z-score is over the group's tokens with s other than
0; if outcomes are equal the gate is .5, so such groups also teach. As released, "none" replaces all tokens between the
two turns by "No information found.". Left out: the bound on the size of the second z-score, which is never reached.
Ours: one outcome for the whole episode (the form for single turns), and no decay of the weight.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, Positive, Requirement
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    group_scores,
    group_statistics,
    on_turn_tokens,
)
from swarm.objectives.recipe import Recipe


class FeedbackShift(AdvantagePart):
    """Z-score of the outcome, plus the gated z-score of the shift of the next turn by the environment's feedback.

    Source: InfoPO, arXiv:2603.00656; kfq20/InfoPO `compute_info_grpo_advantage`.
    """

    equation = "A = z_G(R) + strength sigmoid(-std_G(R) / temperature) z_{G, tokens}(s_k / |a_k|)"
    always_needs = frozenset({Requirement.TURNS, Requirement.FEEDBACK_SHIFTS, Requirement.ZERO_VARIANCE_GROUPS})
    strength: NotNegative = 0.1
    temperature: Positive = 0.05
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.feedback_shifts is not None, "the run does not supply feedback_shifts"
        rewards = batch.rewards.to(torch.float64)
        lengths = torch.zeros_like(batch.feedback_shifts, dtype=torch.float64)
        places = batch.turn_ids.clamp(min=0, max=lengths.shape[1] - 1)
        lengths.scatter_add_(1, places, batch.mask.to(torch.float64))
        shifts = on_turn_tokens(batch.feedback_shifts.to(torch.float64) / lengths.clamp(min=1), batch)
        has_shift = batch.mask & (shifts != 0)
        groups = batch.group_index[:, None].expand(shifts.shape)
        scores = torch.zeros_like(shifts)
        if bool(has_shift.any()):
            scores[has_shift] = group_scores(shifts[has_shift], groups[has_shift], self.floor)
        spread = group_statistics(rewards, batch.group_index)
        std = torch.where(spread.count > 1, spread.std, 1.0)
        gate = self.strength * torch.sigmoid(-std / self.temperature)
        outcome = group_scores(rewards, batch.group_index, self.floor)
        return (outcome[:, None] + gate[:, None] * scores).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="infopo",
    title="InfoPO: Information-Driven Policy Optimization for User-Centric Agents",
    acronym="InfoPO",
    arxiv="2603.00656",
    verification="code",
    advantage=FeedbackShift(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
