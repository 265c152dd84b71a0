"""Advantages of rollouts from the rewards of their group.

Invariant: a group whose rewards are all equal gets exactly 0, whatever the rounding of its mean.
Shape letters: N rollouts.
"""

import torch
from torch import Tensor


def group_z_score(rewards: Tensor, group_index: Tensor, floor: float) -> Tensor:
    """(reward - mean of the group) / (unbiased standard deviation of the group + floor).

    Args:
        rewards: [N].
        group_index: int64 [N], >= 0; every member of a group must be present.
        floor: added to the standard deviation: 1e-6 (verl), 1e-4 (TRL), 1e-8 (swarm sampling).

    Returns:
        [N] in the dtype of `rewards`. A group of one gets 0.

    Source: arXiv:2402.03300 section 4.1.2; verl `compute_grpo_outcome_advantage`.
    """
    values = rewards.to(torch.float64)
    num_groups = int(group_index.max()) + 1
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    count = zeros.index_add(0, group_index, torch.ones_like(values))
    mean = zeros.index_add(0, group_index, values) / count.clamp(min=1)
    centred = values - mean[group_index]
    variance = zeros.index_add(0, group_index, centred**2) / (count - 1).clamp(min=1)
    largest = zeros.scatter_reduce(0, group_index, values, "amax", include_self=False)
    smallest = zeros.scatter_reduce(0, group_index, values, "amin", include_self=False)
    scores = centred / (variance.sqrt()[group_index] + floor)
    has_signal = (largest > smallest)[group_index]
    return torch.where(has_signal, scores, torch.zeros_like(scores)).to(rewards.dtype)
