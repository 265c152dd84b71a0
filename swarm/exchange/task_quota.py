"""Quota of a task: how many groups of one task one party may have in a window of places, and all in one draw.

Invariant: the bounds follow how often tasks repeat in the window and among the groups that wait, so that a run of few
tasks, or of one, goes on like one of many; who sends one task for ever moves that mean only by what all others are not.
"""

import math
from collections import Counter
from typing import Final

from swarm.peers.parties import SHARE
from swarm.types import TaskName

WINDOW: Final = 64  # places
_FEW: Final = 16  # groups: so many do not yet tell whether tasks repeat, and two of one task are let in
_RARE: Final = 0.02  # groups of one task by one party in a window: from here on chance alone brings a second one
_DEVIATIONS: Final = 3.0  # of a Poisson count above its mean: where tasks repeat 1 to 2 of 100 honest groups are above


class TaskQuota:
    """Counts of the tasks that were drawn lately or wait, and the bounds that follow from them.

    Args:
        max_reuse: how many places one group may take.

    Example:
        quota = TaskQuota()
        quota.count(("sort", 7), 1)
        quota.most_of_party(share=8)
    """

    def __init__(self, max_reuse: int = 1) -> None:
        self._max_reuse = max_reuse
        self._counts = Counter[TaskName]()  # above 0
        self._total = 0

    def count(self, task: TaskName, by: int) -> None:
        """A group of a task came (1) or went (-1); nothing for a task without a name, which is not known."""
        if not task[0]:
            return
        self._total += by
        self._counts[task] += by
        if not self._counts[task]:
            del self._counts[task]

    @property
    def share_of_one(self) -> float:
        """Share of one task among all groups, were tasks alike: by how many are told apart, or by how few coincide."""
        if not self._counts:
            return 0.0
        distinct = 1 / len(self._counts)
        return min(distinct, 2 * (distinct - 1 / self._total))  # of n groups of T tasks, n * n / 2T pairs coincide

    def most_of_party(self, share: int) -> int:
        """Places of a window for one task as groups of a party that may have `share` places of it."""
        mean = share * self.share_of_one / self._max_reuse
        least = 2 if self._total < _FEW else 1
        return self._max_reuse * max(least, math.ceil(mean + _DEVIATIONS * math.sqrt(mean)) + (mean > _RARE))

    def most_of_draw(self, num_places: int) -> int:
        """Places of one draw for one task: an eighth, or twice its mean where tasks repeat more."""
        return max(1, -(-num_places // SHARE), math.ceil(2 * num_places * self.share_of_one))
