"""Turn reward-to-go: the return from a turn on, compared with the same turn of the group's other episodes.

    G_k = sum_{j>=k} .95^(j-k) r_j, the outcome in the last r; A_k = G_k - mean over the group's episodes with a turn k

The plain form that every published turn-level method varies: no critic, no deviation. All of it is ours.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, PositiveShare, Requirement
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    by_cell,
    discounted_returns,
    group_centred,
    on_turn_tokens,
    turn_cells,
    turns_of,
)
from swarm.objectives.recipe import Recipe


class TurnReturn(AdvantagePart):
    """Discounted reward-to-go of a turn minus the mean over the group's episodes that have that turn."""

    equation = "A_k = G_k - mean_{G, k} G_k, G_k = sum_{j>=k} gamma^(j-k) (r_j + R 1[j last])"
    always_needs = frozenset({Requirement.TURNS, Requirement.TURN_SIGNAL})
    gamma: PositiveShare = 0.95

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        returns = discounted_returns(turns.with_outcome(batch), self.gamma)
        centred = by_cell(returns, turn_cells(batch, turns), turns, group_centred)
        return on_turn_tokens(centred, batch).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="turn_reward_to_go",
    title="Reward-to-go by turns, against the group",
    advantage=TurnReturn(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
