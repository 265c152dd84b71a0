"""Statistics of rollouts by their group, in float64.

Invariant: the values are those of all members of each group, dropped ones included.
Shape letters: N rollouts, M groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    """Statistics of a value over each group, repeated for every rollout of the group."""

    count: Tensor  # [N]
    mean: Tensor  # [N]
    std: Tensor  # [N], unbiased; 0 for a group of one
    largest: Tensor  # [N]
    smallest: Tensor  # [N]

    @property
    def has_signal(self) -> Tensor:
        """bool [N]: not all values of the group are equal."""
        return self.largest > self.smallest


def group_statistics(values: Tensor, group_index: Tensor) -> GroupStatistics:
    """Returns statistics of `values` [N] over the groups of `group_index` (int64 [N], >= 0)."""
    values = values.to(torch.float64)
    num_groups = int(group_index.max()) + 1
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    count = zeros.index_add(0, group_index, torch.ones_like(values))
    mean = zeros.index_add(0, group_index, values) / count.clamp(min=1)
    squares = zeros.index_add(0, group_index, (values - mean[group_index]) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    largest = zeros.scatter_reduce(0, group_index, values, "amax", include_self=False)
    smallest = zeros.scatter_reduce(0, group_index, values, "amin", include_self=False)
    spread = (statistic[group_index] for statistic in (count, mean, std, largest, smallest))
    return GroupStatistics(**dict(zip(("count", "mean", "std", "largest", "smallest"), spread, strict=True)))


def group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    """Sum of `values` [N] over each group of `group_index` (int64 [N], >= 0), for every rollout: float64 [N]."""
    values = values.to(torch.float64)
    sums = torch.zeros(int(group_index.max()) + 1, dtype=torch.float64, device=values.device)
    return sums.index_add(0, group_index, values)[group_index]


def group_lower_median(values: Tensor, group_index: Tensor) -> Tensor:
    """Median of the group, for every rollout: float64 [N]; of an even number of values, the lower middle one."""
    return _of_each(values, group_index, torch.median)


def group_median(values: Tensor, group_index: Tensor) -> Tensor:
    """Median of the group, for every rollout: float64 [N]; of an even number of values, the mean of the middle two."""
    return _of_each(values, group_index, lambda members: torch.quantile(members, 0.5))


def _of_each(values: Tensor, group_index: Tensor, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    values = values.to(torch.float64)
    found = torch.empty_like(values)
    for group in group_index.unique().tolist():
        members = group_index == group
        found[members] = statistic(values[members])
    return found


def where_signal(advantages: Tensor, statistics: GroupStatistics, rewards: Tensor) -> Tensor:
    """Advantages in the dtype of `rewards`, exactly 0 in groups whose values are all equal."""
    return torch.where(statistics.has_signal, advantages, torch.zeros_like(advantages)).to(rewards.dtype)


def group_centred(values: Tensor, group_index: Tensor) -> Tensor:
    """Value minus the group's mean [N], in the dtype of `values`; exactly 0 in groups whose values are all equal."""
    group = group_statistics(values, group_index)
    return where_signal(values.to(group.mean.dtype) - group.mean, group, values)


def group_scores(values: Tensor, group_index: Tensor, floor: float) -> Tensor:
    """(value - group mean) / (unbiased std + floor): [N] in the dtype of `values`; exactly 0 for equal values.

    The std is at least 64 roundings of the mean: whatever `floor` is, values that differ by rounding score near 0.
    """
    group = group_statistics(values, group_index)
    least = 64 * torch.finfo(values.dtype).eps * group.mean.abs()
    return where_signal((values.to(group.mean.dtype) - group.mean) / (group.std.maximum(least) + floor), group, values)


def group_left_out(values: Tensor, group_index: Tensor) -> Tensor:
    """Value minus the mean of the group's other values [N], in their dtype; in a group of one, the value itself."""
    group = group_statistics(values, group_index)
    exact = values.to(group.mean.dtype)
    left_out = group.count / (group.count - 1).clamp(min=1) * (exact - group.mean)
    return torch.where(group.count > 1, where_signal(left_out, group, exact), exact).to(values.dtype)
