"""Two levels (MatchTIR): half the z-score of the whole episode, half that of a turn's return among turns of its number.

    A_k = (z_G(sum r) + z_{G, k}(G_k)) / 2, G_k discounted by .9; a single value is not centred; clip .2, token mean

The objective of the method. Its turn rewards, a matching of the calls with a reference trace, are the environment's
work. Ours: the outcome is a reward of the last turn; clip and token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, PositiveShare, Requirement
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    by_cell,
    discounted_returns,
    group_scores,
    group_statistics,
    on_turn_tokens,
    turn_cells,
    turns_of,
)
from swarm.objectives.recipe import Recipe


class TwoLevels(AdvantagePart):
    """Mean of two z-scores: of the episode's total reward, and of the turn's return among turns of the same number.

    Source: MatchTIR, arXiv:2601.10712; quchangle1/MatchTIR `compute_grpo_outcome_advantage`.
    """

    equation = "A_k = (z_G(sum_j r_j) + z_{G, k}(G_k)) / 2, z(x) = (x - mean) / (std + floor), x / (1 + floor) alone"
    always_needs = frozenset({Requirement.TURNS, Requirement.TURN_REWARDS, Requirement.TURN_SIGNAL})
    gamma: PositiveShare = 0.9
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        rewards = turns.with_outcome(batch)
        returns = discounted_returns(rewards, self.gamma)
        of_turn = by_cell(returns, turn_cells(batch, turns), turns, self._scores)
        of_episode = self._scores(rewards.sum(dim=1), batch.group_index)[:, None]
        return on_turn_tokens((of_episode + of_turn) / 2, batch).to(batch.rewards.dtype)

    def _scores(self, values: Tensor, cells: Tensor) -> Tensor:
        is_alone = group_statistics(values, cells).count < 2
        return torch.where(is_alone, values / (1 + self.floor), group_scores(values, cells, self.floor))


RECIPE = Recipe(
    name="matchtir",
    title="MatchTIR: Fine-Grained Supervision for Tool-Integrated Reasoning via Bipartite Matching",
    acronym="MatchTIR",
    arxiv="2601.10712",
    verification="code",
    advantage=TwoLevels(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
