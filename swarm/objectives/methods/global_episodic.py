"""Global and episodic bonuses: a turn is worth the more, the newer its state is in the episode and in the run.

    b_k = .1 / sqrt(n_k (1 + N_k)), n_k visits of the episode so far, N_k earlier episodes; A_k as `turn_reward_to_go`

The product, which needs both kinds of novelty, is known from reviews of the paper. Ours: one over the root of a count
for each factor, in place of learned bonuses; counts of state keys in hashed cells, by environment, each state once an
episode (tables of several nodes merge by adding their cells); only episodes of our own policy are counted, so that
no other lineage uses up the novelty of our states; reward-to-go of turns minus the group's, as in `turn_reward_to_go`;
the strength.
"""

import math
import zlib
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Count, Memory, NotNegative, PositiveShare, Requirement, Scored
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


class NoveltyReturn(AdvantagePart):
    """Reward-to-go with a bonus for new states, minus the mean of the group's turns with the same number.

    Source: arXiv:2306.03236, as quoted in reviews of the paper.
    """

    equation = "A_k = G_k - mean_{G,k} G, G_k = sum_{j>=k} gamma^(j-k) (r_j + R 1[j last] + strength (n_j (1+N_j))^-.5)"
    always_needs = frozenset({Requirement.TURNS, Requirement.STATE_KEYS, Requirement.ZERO_VARIANCE_GROUPS})
    gamma: PositiveShare = 0.95
    strength: NotNegative = 0.1
    num_cells: Count = 4096  # of the table of counts

    def initial(self) -> Memory:
        return {"cells": {}}

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        returns = discounted_returns(turns.with_outcome(batch) + self.strength * self.bonuses(batch), self.gamma)
        centred = by_cell(returns, turn_cells(batch, turns), turns, group_centred)
        return on_turn_tokens(centred, batch).to(batch.rewards.dtype)

    def bonuses(self, batch: Batch) -> Tensor:
        """1 / sqrt(n (1 + N)) of the state after each turn: float64 [N, K], 0 for a state without a key."""
        known: Mapping[str, int] = self.remembered(batch)["cells"]
        found = torch.zeros_like(turns_of(batch).rewards)
        for row, cells in enumerate(self.cells_of(batch)):
            visits: Counter[str] = Counter()
            for turn, cell in enumerate(cells):
                if cell:
                    visits[cell] += 1
                    found[row, turn] = 1 / math.sqrt(visits[cell] * (1 + known.get(cell, 0)))
        return found

    def cells_of(self, batch: Batch) -> list[list[str]]:
        """Cell of the state after each turn, for each rollout; "" for a state without a key."""
        names = [batch.task_keys[group].rpartition("/")[0] for group in batch.group_index.tolist()]
        rows = zip(names, batch.state_keys or ((),) * len(names), strict=True)
        return [
            [str(zlib.crc32(f"{name} {key}".encode()) % self.num_cells) if key else "" for key in keys]
            for name, keys in rows
        ]

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        counts = Counter[str](memory["cells"])
        is_own = (~scored.batch.is_external & (scored.batch.length > 0)).tolist()
        for cells, own in zip(self.cells_of(scored.batch), is_own, strict=True):
            counts.update({cell for cell in cells if cell and own})
        return {"cells": dict(counts)}


RECIPE = Recipe(
    name="global_episodic",
    title="A Study of Global and Episodic Bonuses for Exploration in Contextual MDPs",
    arxiv="2306.03236",
    verification="secondary",
    advantage=NoveltyReturn(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
