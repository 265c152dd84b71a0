"""Roles of an episode: one policy plays several, and each has a reward of its own.

Invariant: a rollout counts once in the statistics of a role, whatever turns that had in it.
Shape letters: N rollouts, L longest response in tokens, K most turns.
"""

import torch
from torch import Tensor

from swarm.objectives.batch import Batch


def tokens_of_roles(batch: Batch) -> dict[str, Tensor]:
    """Role -> bool [N, L], tokens of its turns. "" are turns of no role, which count with the whole episode."""
    found: dict[str, Tensor] = {}
    for rollout, turns in enumerate(batch.turn_roles or ()):
        for turn, role in enumerate(turns):
            tokens = found.setdefault(role, torch.zeros_like(batch.mask))
            tokens[rollout] |= batch.turn_ids[rollout] == turn
    return found


def role_rewards(batch: Batch, role: str) -> Tensor:
    """What each episode was worth to a role: [N]; 0 where its environment named no reward of the role."""
    if not role:
        return batch.rewards
    rewards = batch.reward_parts.get(role)
    return torch.zeros_like(batch.rewards) if rewards is None else rewards.to(batch.rewards.dtype)
