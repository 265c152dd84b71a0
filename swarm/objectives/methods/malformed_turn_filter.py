"""Malformed turns left out: a turn with a call that cannot be parsed is dropped, whatever the episode's reward.

    A = z; dropped at the tokens of malformed turns; clip .2, token mean

A success then does not teach its malformed turns; their cost is the loss of the episode's reward. Users know this
plain form as masking; all of it is ours.
"""

import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores, on_turn_tokens, status_mask
from swarm.objectives.recipe import Recipe


class WellFormedTurns(AdvantagePart):
    """Z-score of the reward in its group; tokens of malformed turns are dropped."""

    equation = "A_t = z_i if the turn of t is well formed, else dropped"
    always_needs = frozenset({Requirement.TURNS})
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        scores = group_scores(batch.rewards, batch.group_index, self.floor)[:, None]
        is_malformed = on_turn_tokens(status_mask(batch, TurnStatus.MALFORMED), batch)
        return torch.where(is_malformed, torch.full_like(scores, torch.nan), scores)


RECIPE = Recipe(
    name="malformed_turn_filter",
    title="Malformed turns left out of the loss",
    advantage=WellFormedTurns(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
