"""Anchor states (GiGPO): compares episodes of a group, and also actions of the group from the same state.

    A_k = (sum r - mean_G) + (G_k - mean over the group's turns that begin in the same state); G_k discounted by .95

The state in which a turn begins is the environment's key after the turn before; all episodes of a group begin in one
state. No division by deviations, as released; a turn alone in its state has the first summand only. The KL penalty is
left out, as in `grpo`. Ours: the outcome is a reward of the last turn; states are equal or not, never similar.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, PositiveShare, Requirement
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    by_cell,
    discounted_returns,
    group_centred,
    on_turn_tokens,
    state_cells,
    turns_of,
)
from swarm.objectives.recipe import Recipe


class AnchorState(AdvantagePart):
    """Total reward minus the group's mean, plus the turn's return minus the mean of the group's turns from its state.

    Source: GiGPO, arXiv:2505.10978 eq. 3, 7, 8; verl-agent `core_gigpo.py` (mode `mean_norm`).
    """

    equation = "A_k = (sum_j r_j - mean_G) + strength (G_k - mean_{G, state of k} G)"
    always_needs = frozenset({Requirement.TURNS, Requirement.TURN_SIGNAL, Requirement.STATE_KEYS})
    gamma: PositiveShare = 0.95
    strength: NotNegative = 1.0  # of the summand by states

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        rewards = turns.with_outcome(batch)
        of_state = by_cell(discounted_returns(rewards, self.gamma), state_cells(batch, turns), turns, group_centred)
        of_episode = group_centred(rewards.sum(dim=1), batch.group_index)[:, None]
        return on_turn_tokens(of_episode + self.strength * of_state, batch).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="gigpo",
    title="Group-in-Group Policy Optimization for LLM Agent Training",
    acronym="GiGPO",
    arxiv="2505.10978",
    verification="code",
    advantage=AnchorState(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
