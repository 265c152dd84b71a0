"""Turn groups (A2TGPO): a turn's information gain is compared with the group's gains at that turn, and sets its clip.

    n_k = z of the gain among the group's turns k; A_k = z_G(R) + .3 sum_{j>=k} n_j / sqrt(terms); widths times c_k

c_k = 1 + .3 (2 sigmoid(n_k) - 1), 1 for the last turn, which has no gain. Turns of one number see similar contexts, and
the root keeps the scale of a sum of z-scores at any length. Known from notes on the paper. Ours: no discount; AT2PO's
half-widths for the same ratio; a mean over rollouts, as in AT2PO.
"""

from typing import Final

import torch
from torch import Tensor

from swarm.objectives.part import (
    AdvantagePart,
    Batch,
    NotNegative,
    PositiveShare,
    Requirement,
    Scope,
    Scored,
    Share,
    TokenLosses,
    WeightPart,
)
from swarm.objectives.parts import (
    RolloutMean,
    TurnRatio,
    by_cell,
    clip_surrogate,
    discounted_returns,
    group_scores,
    information_gains,
    on_turn_tokens,
    turn_cells,
    turns_of,
)
from swarm.objectives.recipe import Recipe

_FLOOR: Final = 1e-6  # of deviations


def relative_gains(batch: Batch) -> Tensor:
    """float64 [N, K]: z-score of a turn's gain among the group's turns of the same number; 0 for last turns."""
    turns = turns_of(batch)
    cells = turn_cells(batch, turns) * 2 + turns.is_last  # the last turns have cells of their own: they have no gain
    found = by_cell(information_gains(batch), cells, turns, lambda values, own: group_scores(values, own, _FLOOR))
    return torch.where(turns.is_last, 0.0, found)


class TurnGroup(AdvantagePart):
    """Z-score of the outcome, plus the rescaled sum of the relative gains from the turn on.

    Source: A2TGPO, arXiv:2605.06200, as quoted in a note on its code.
    """

    equation = "A_k = z_G(R) + strength sum_{K>j>=k} gamma^(j-k) n_j / sqrt(K - k), n_j = z_{G, j}(P_{j+1} - P_j)"
    always_needs = frozenset({Requirement.TURNS, Requirement.ANSWER_PROBS, Requirement.ZERO_VARIANCE_GROUPS})
    strength: NotNegative = 0.3
    gamma: PositiveShare = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        place = torch.arange(turns.exists.shape[1], device=batch.mask.device)[None]
        terms = (turns.num_turns[:, None] - 1 - place).clamp(min=1).to(torch.float64)
        gains = discounted_returns(relative_gains(batch), self.gamma) / terms.sqrt()
        outcome = group_scores(batch.rewards, batch.group_index, _FLOOR)[:, None]
        return (outcome + self.strength * on_turn_tokens(gains, batch)).to(batch.rewards.dtype)


class GainClip(WeightPart):
    """PPO's clip, wider for a turn with more gain than the group's turns of the same number, narrower for less gain.

    Source: A2TGPO, arXiv:2605.06200.
    """

    equation = "L_t = -min(r A, clip(r, 1 - low c_k, 1 + high c_k) A), c_k = 1 + width (2 sigmoid(n_k) - 1)"
    scope = Scope.GROUP
    low: float = 3e-3  # half-width
    high: float = 4e-3  # half-width
    width: Share = 0.3

    def __call__(self, scored: Scored) -> TokenLosses:
        relative = relative_gains(scored.batch)
        scale = on_turn_tokens(1 + self.width * (2 * torch.sigmoid(relative) - 1), scored.batch)
        return clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low * scale, 1 + self.high * scale)


RECIPE = Recipe(
    name="a2tgpo",
    title="A^2TGPO: Agentic Turn-Group Policy Optimization with Adaptive Turn-level Clipping",
    acronym="A2TGPO",
    arxiv="2605.06200",
    verification="secondary",
    advantage=TurnGroup(),
    ratio=TurnRatio(),
    weight=GainClip(),
    aggregate=RolloutMean(),
)
