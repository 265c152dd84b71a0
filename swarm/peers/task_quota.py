"""Quota of a task: how many groups of one task one party may have in a window of places, and all in one draw.

Invariant: the bounds follow how often tasks repeat in the window and among the groups that wait, so that a run of few
tasks, or of one, goes on like one of many. What one party has of one task counts once, so that nobody widens the bounds
alone; and among four parties or more, one, whichever it is, is left out where that widens them, so that nobody narrows
them alone either.
"""

import math
from collections import Counter
from typing import Final, TypeVar

from swarm.trust_policy import SHARE, WINDOW
from swarm.types import TaskName

_UNBOUNDED: Final = 10**9
_RARE: Final = 0.02  # groups of one task by one party in a window: from here on chance alone brings a second one
_LEAVES_OUT: Final = 4  # parties: of fewer, two with one task in common would be taken for a run of one task
_DEVIATIONS: Final = 3.0  # of a Poisson count above its mean: where tasks repeat 1 to 2 of 100 honest groups are above

Key = TypeVar("Key")


class TaskQuota:
    """Counts of the tasks that were drawn lately or wait, and the bounds that follow from them.

    Args:
        max_reuse: how many places one group may take.

    Example:
        quota = TaskQuota()
        quota.count(party, ("sort", 7), 1)
        quota.most_of_party(share=8)
    """

    def __init__(self, max_reuse: int = 1) -> None:
        self._max_reuse = max_reuse
        self._groups = Counter[tuple[str, TaskName]]()  # above 0, as the next two
        self._holders = dict[TaskName, set[str]]()  # parties that have groups of it
        self._parties = Counter[str]()  # tasks that it has groups of
        self._alone = Counter[str]()  # tasks that no other party has groups of
        self._share: float | None = None  # as the groups are now

    def count(self, party: str, task: TaskName, by: int) -> None:
        """A group of a task by a party came (1) or went (-1).

        What one party has of one task counts once: nobody can show alone that tasks repeat. Newcomers (no party) show
        neither that they repeat nor that they do not, and a task without a name is not known: both count for nothing.
        """
        if not party or not task[0]:
            return
        _add(self._groups, (party, task), by)
        if self._groups[party, task] == max(0, by):
            self._share = None
            _add(self._parties, party, by)
            self._hold(party, task, is_new=by > 0)

    def _hold(self, party: str, task: TaskName, *, is_new: bool) -> None:
        holders = self._holders.setdefault(task, set())
        if len(holders) == 1:
            _add(self._alone, next(iter(holders)), -1)
        (holders.add if is_new else holders.discard)(party)
        if len(holders) == 1:
            _add(self._alone, next(iter(holders)), 1)
        if not holders:
            del self._holders[task]

    @property
    def share_of_one(self) -> float:
        """Share of one task among all groups, were tasks alike: by how many are told apart, or by how few coincide.

        1 where only one party is known: then there is nothing to compare with, and nobody to be protected.
        """
        if len(self._parties) <= 1:
            return 1.0
        if self._share is None:
            num_groups, num_tasks = len(self._groups), len(self._holders)
            self._share = _share_of_one(num_groups, num_tasks)
            if len(self._parties) >= _LEAVES_OUT:
                without = ((num_groups - has, num_tasks - self._alone[party]) for party, has in self._parties.items())
                self._share = max(self._share, *(_share_of_one(groups, tasks) for groups, tasks in without))
        return self._share

    def most_of_party(self, share: int) -> int:
        """Places of a window for one task as groups of a party that may have `share` places of it; any number where it
        is the only one: there is nobody whose groups it displaces, and nothing to compare it with."""
        if share >= WINDOW:
            return _UNBOUNDED
        mean = share * self.share_of_one / self._max_reuse
        most = math.ceil(mean + _DEVIATIONS * math.sqrt(mean)) + (mean > _RARE)
        return self._max_reuse * max(1, most)

    def most_of_draw(self, num_places: int) -> int:
        """Places of one draw for one task: an eighth, or twice its mean where tasks repeat more."""
        return max(1, -(-num_places // SHARE), math.ceil(2 * num_places * self.share_of_one))


def _share_of_one(num_groups: int, num_tasks: int) -> float:
    distinct = 1 / num_tasks
    return min(distinct, 2 * (distinct - 1 / num_groups))  # of n groups of T tasks, n * n / 2T coincide


def _add(counts: Counter[Key], key: Key, by: int) -> None:
    counts[key] += by
    if not counts[key]:
        del counts[key]
