"""Turns left out (TRLOO): a turn's return minus the mean return of the group's other episodes at that turn.

    A_k = n/(n-1) (G_k - mean over the n episodes with a turn k), G_k alone; clip .2 / .28, token mean

A turn's own return in the baseline would bias the gradient. Dr. Kernel's profiling rewards are the environment's
work, and its rejection of mismatched rollouts is what `ratio_band` and corrections do for every recipe here. Ours: the
outcome is a reward of the last turn; the mean over tokens.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, PositiveShare, Requirement
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    by_cell,
    discounted_returns,
    group_left_out,
    on_turn_tokens,
    turn_cells,
    turns_of,
)
from swarm.objectives.recipe import Recipe


class TurnLeaveOneOut(AdvantagePart):
    """Return of a turn minus the mean return of the group's other episodes at that turn; without others, the return.

    Source: Dr. Kernel, arXiv:2602.05885; hkust-nlp/KernelGYM `compute_multi_turn_rloo_outcome_advantage`.
    """

    equation = "A_k = G_k - mean_{j != i} G_k^j; G_k where no other has a turn k"
    always_needs = frozenset({Requirement.TURNS, Requirement.TURN_SIGNAL})
    gamma: PositiveShare = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        returns = discounted_returns(turns.with_outcome(batch), self.gamma)
        left_out = by_cell(returns, turn_cells(batch, turns), turns, group_left_out)
        return on_turn_tokens(left_out, batch).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="trloo",
    title="Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations",
    acronym="TRLOO",
    arxiv="2602.05885",
    verification="code",
    advantage=TurnLeaveOneOut(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
