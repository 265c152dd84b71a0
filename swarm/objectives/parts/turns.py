"""Turns of episodes: rewards, returns, statistics over comparable turns, and values of turns at their tokens.

Invariant: statistics are of one group and count the turns that each rollout has; a single answer is an episode of one
turn. Other nodes choose actions only: rewards, states and statuses are those of the replay here.
Shape letters: N rollouts, L longest response in tokens, K most turns.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives.part import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Turns of each rollout, at most K."""

    exists: Tensor  # bool [N, K]
    rewards: Tensor  # float64 [N, K], of the turn
    calls: Tensor  # int64 [N, K], well-formed tool calls
    is_last: Tensor  # bool [N, K]

    @property
    def num_turns(self) -> Tensor:
        """Number of turns of each rollout: int64 [N], at least 1."""
        return self.exists.sum(dim=1)

    def with_outcome(self, batch: Batch) -> Tensor:
        """Rewards [N, K] of the turns, with the episode's reward added at the last turn."""
        return self.rewards + torch.where(self.is_last, batch.rewards.to(torch.float64)[:, None], 0.0)


def turns_of(batch: Batch) -> Turns:
    """Returns the turns of a batch; one turn for each rollout if the batch has no turn fields."""
    device, count = batch.mask.device, batch.num_rollouts
    if batch.turn_rewards is None or batch.num_turns is None or batch.num_calls is None:
        one = torch.ones((count, 1), dtype=torch.bool, device=device)
        zeros = torch.zeros((count, 1), dtype=torch.float64, device=device)
        return Turns(exists=one, rewards=zeros, calls=zeros.to(torch.int64), is_last=one)
    place = torch.arange(batch.turn_rewards.shape[1], device=device)[None]
    num_turns = batch.num_turns.clamp(min=1)[:, None]
    exists = place < num_turns
    rewards = torch.where(exists, batch.turn_rewards.to(torch.float64), 0.0)
    calls = torch.where(exists, batch.num_calls, 0)
    return Turns(exists=exists, rewards=rewards, calls=calls, is_last=place == num_turns - 1)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Returns [N, K], sum_{j >= k} gamma^(j-k) r_j, of rewards r [N, K], which must be 0 after the last turn."""
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for turn in reversed(range(rewards.shape[1])):
        following = rewards[:, turn] + gamma * following
        returns[:, turn] = following
    return returns


def on_turn_tokens(values: Tensor, batch: Batch) -> Tensor:
    """`values` [N, K] at the tokens of each turn: [N, L]. A turn id outside [0, K - 1] counts as the nearest one."""
    return values.gather(1, batch.turn_ids.clamp(min=0, max=values.shape[1] - 1))


def by_cell(values: Tensor, cells: Tensor, turns: Turns, statistic: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A statistic of `values` [N, K] over the turns that share a cell: [N, K], 0 where there is no turn.

    Args:
        values: float64.
        cells: int64 [N, K], >= 0.
        turns: supplies the turns that exist.
        statistic: of values [n] and their cells [n], such as `group_centred`.
    """
    found = torch.zeros_like(values)
    numbers = torch.unique(cells[turns.exists], return_inverse=True)[1]
    found[turns.exists] = statistic(values[turns.exists], numbers)
    return found


def turn_cells(batch: Batch, turns: Turns) -> Tensor:
    """Cells int64 [N, K] that turns with the same number in episodes of one group share."""
    most = turns.exists.shape[1]
    return batch.group_index[:, None] * most + torch.arange(most, device=batch.mask.device)[None]


def state_cells(batch: Batch, turns: Turns) -> Tensor:
    """Cells int64 [N, K] that turns share if they begin in the same state, in episodes of one group.

    First turns of a group begin in the same state. A turn has a cell of its own if the environment does not name the
    state before the turn; without state keys in the batch, the cells are those of `turn_cells`.
    """
    if batch.state_keys is None:
        return turn_cells(batch, turns)
    numbers: dict[Hashable, int] = {}
    groups: Sequence[int] = batch.group_index.tolist()
    rows: list[list[int]] = []
    for row, (group, keys) in enumerate(zip(groups, batch.state_keys, strict=True)):
        names: list[Hashable] = [
            (group,),
            *((group, key) if key else (group, row, turn) for turn, key in enumerate(keys)),
        ]
        places = [numbers.setdefault(name, len(numbers)) for name in names]
        rows.append((places + [0] * turns.exists.shape[1])[: turns.exists.shape[1]])
    return torch.tensor(rows, dtype=torch.int64, device=batch.mask.device)


def status_mask(batch: Batch, *statuses: TurnStatus) -> Tensor:
    """bool [N, K]: turns that ended with one of these statuses."""
    exists = turns_of(batch).exists
    found = torch.zeros_like(exists)
    for row, of_rollout in enumerate(batch.turn_statuses or ()):
        for turn, status in enumerate(of_rollout):
            found[row, turn] = status in statuses
    return found & exists


def information_gains(batch: Batch) -> Tensor:
    """float64 [N, K]: rise of the right answer's probability by a turn; 0 for the last turn and for missing turns."""
    assert batch.answer_probs is not None, "the run does not supply answer_probs"
    probs, turns = batch.answer_probs.to(torch.float64), turns_of(batch)
    following = torch.cat([probs[:, 1:], probs[:, :1]], dim=1)
    return torch.where(turns.exists & ~turns.is_last, following - probs, 0.0)


def is_finished(batch: Batch) -> Tensor:
    """bool [N]: episodes that neither the limit of turns nor that of tokens ended."""
    return ~status_mask(batch, TurnStatus.LIMIT).any(dim=1) & ~batch.is_truncated
