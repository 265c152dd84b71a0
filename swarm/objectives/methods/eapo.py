"""Discount by rounds (EAPO, IterResearch): a round's reward is the outcome, discounted for every round that follows.

    r_k = .9^(K-k) R; A_k = z of r_k over all rounds of the group; PPO's minimum on the round's ratio, 3e-4 / 4e-4

Of two successes, the shorter one is worth more. The environment begins a conversation for every round, with the
report so far (kind `notes`, or your own). Known from notes on the paper, which cuts the rounds down to a multiple
of its workers; here rows are packed and shared by tokens, so no round is left out. Ours: the discount's value,
one z-score over all rounds, and the token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, PositiveShare, Requirement
from swarm.objectives.parts import Clip, TokenMean, TurnRatio, by_cell, group_scores, on_turn_tokens, turns_of
from swarm.objectives.recipe import Recipe


class RoundDiscount(AdvantagePart):
    """Outcome discounted by the rounds left, as a z-score over the group's rounds. Source: arXiv:2511.07327."""

    equation = "A_k = (r_k - mean_G r) / (std_G r + floor), r_k = gamma^(K-k) R, over all rounds of the group"
    always_needs = frozenset({Requirement.TURNS, Requirement.ZERO_VARIANCE_GROUPS})
    gamma: PositiveShare = 0.9
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        place = torch.arange(turns.exists.shape[1], device=batch.mask.device)[None]
        left = (turns.num_turns[:, None] - 1 - place).clamp(min=0).to(torch.float64)
        worth = batch.rewards.to(torch.float64)[:, None] * self.gamma**left
        groups = batch.group_index[:, None].expand(worth.shape)
        scores = by_cell(worth, groups, turns, lambda values, own: group_scores(values, own, self.floor))
        return on_turn_tokens(scores, batch).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="eapo",
    title="IterResearch: Rethinking Long-Horizon Agents via Markovian State Reconstruction",
    acronym="EAPO",
    arxiv="2511.07327",
    verification="secondary",
    advantage=RoundDiscount(),
    ratio=TurnRatio(),
    weight=Clip(low=3e-4, high=4e-4),
    aggregate=TokenMean(),
)
