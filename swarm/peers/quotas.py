"""Quotas: stream items and external groups of a neighbour, and groups of one task by one party.

Invariants: a node that holds fewer external groups than one draw may take refuses none, and no neighbour can use up the
share of another. The bounds of a task follow from how often tasks repeat, so that a run of few tasks goes on like one
of many. The groups that one party has of one task count once, and among four parties or more any one party is left out
if that widens the bounds, so that no party moves them alone.
"""

import math
from collections import Counter
from typing import Final, TypeVar

from swarm.clock import Clock
from swarm.config import ReplayConfig
from swarm.flow import BoundedTable, RateLimiter, RunningMean, TokenBucket
from swarm.trust_policy import ITEMS_PER_GROUP, SHARE, SURPLUS, WINDOW
from swarm.types import NodeId, TaskName

GROUPS_PER_MINUTE: Final = 6000  # that one peer may bring; 100 a second and more is a flood
MAX_NEIGHBOURS: Final = 256  # remembered; there are never more than 64 at a time
_MEMORY: Final = 0.8  # share of the old figure in the running mean of the time between draws
_UNBOUNDED: Final = 10**9
_RARE: Final = 0.02  # groups of one task by one party in a window: from here on chance alone brings a second one
_LEAVES_OUT: Final = 4  # parties: of fewer, two with one task in common would be taken for a run of one task
_DEVIATIONS: Final = 3.0  # of a Poisson count above its mean: where tasks repeat 1 to 2 of 100 honest groups are above

Key = TypeVar("Key")


def stream_quota() -> RateLimiter[NodeId]:
    """Limit of the items on each neighbour's streams: at most twice the rate within any minute, despite reconnects."""
    per_minute = float(ITEMS_PER_GROUP * GROUPS_PER_MINUTE)
    return RateLimiter(per_s=per_minute / 60.0, burst=per_minute, max_keys=MAX_NEIGHBOURS)


class IntakeQuota:
    """Limit of the external groups taken in: 1.5 times what draws consume, one token bucket per neighbour.

    A draw takes up to J external groups, so a node of N that took in every group of every other would check N * I of
    them per step and learn from J. This node takes in about 1.5 * J per draw, spread evenly over the time between its
    draws: a slow learner still finds young groups, and keeps learning its producers' heads. Until the time between
    draws is known, every group is taken. Newcomers have an eighth of this in addition to the share of the others.

    Example:
        quota = IntakeQuota(config.replay, clock)
        if quota.try_take(peer, num_neighbours=4, num_held=7): ...
    """

    def __init__(self, config: ReplayConfig, clock: Clock) -> None:
        self._num_per_draw = config.external_groups
        self._burst = (config.max_age_steps + 1) * config.external_groups  # what the draws of one group's life can take
        self._is_unlimited = config.barrier  # a synchronous step waits for every neighbour's newest group
        self._clock = clock
        self._drawn_at_s: float | None = None
        self._interval_s = RunningMean(_MEMORY)  # between draws
        self._buckets = BoundedTable[NodeId, TokenBucket](MAX_NEIGHBOURS)

    def record_draw(self) -> None:
        """Records the time of a draw."""
        now_s = self._clock.monotonic_s()
        if self._drawn_at_s is not None:
            self._interval_s.add(now_s - self._drawn_at_s)
        self._drawn_at_s = now_s

    def try_take(self, via: NodeId, num_neighbours: int, num_held: int, share: float = 1.0) -> bool:
        """True if one more group from this neighbour is worth fetching and checking; the group then counts.

        Args:
            via: the neighbour.
            num_neighbours: number of connected neighbours that divide this share, >= 1.
            num_held: external groups of these neighbours that wait for a draw.
            share: the part of each draw that these neighbours have together.
        """
        interval_s = self._interval_s.value
        if self._is_unlimited or interval_s is None:
            return True
        assert self._drawn_at_s is not None
        now_s, burst = self._clock.monotonic_s(), max(1.0, share * self._burst / num_neighbours)
        bucket = self._buckets.get(via)
        if bucket is None:
            bucket = self._buckets[via] = TokenBucket(0.0, burst, now_s)
        late_s = max(interval_s, now_s - self._drawn_at_s, 1e-6)  # a learner that stopped needs ever less
        bucket.per_s, bucket.burst = SURPLUS * share * self._num_per_draw / (num_neighbours * late_s), burst
        if (
            num_held < share * self._num_per_draw
        ):  # short of groups: takes it in any case, counted as far as there are tokens
            bucket.spend(now_s)
            return True
        return bucket.try_take(now_s)


class TaskQuota:
    """Counts of the tasks that were drawn lately or wait, and the bounds that follow from them.

    Args:
        max_reuse: most places that one group may take.

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
        self._share: float | None = None  # cached; None after a change

    def count(self, party: str, task: TaskName, by: int) -> None:
        """Counts a group of a task by a party that came (`by` = 1) or went (-1).

        The groups that one party has of one task count once: no party can show alone that tasks repeat. Groups of
        newcomers (no party) and of tasks without a name do not count.
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
        """Estimated share of one task among all groups, if tasks are alike: the smaller of two estimates.

        They come from the number of distinct tasks and from the number of groups that coincide. 1 while only one party
        is known: there is nothing to compare with, and no other party to protect.
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
        """Most places of a window for one task, among a party's `share` places of it.

        Unbounded if `share` is the whole window: a single party displaces no groups of others.
        """
        if share >= WINDOW:
            return _UNBOUNDED
        mean = share * self.share_of_one / self._max_reuse
        most = math.ceil(mean + _DEVIATIONS * math.sqrt(mean)) + (mean > _RARE)
        return self._max_reuse * max(1, most)

    def most_of_draw(self, num_places: int) -> int:
        """Most places of one draw for one task: an eighth, or twice the mean of a task where tasks repeat more."""
        return max(1, -(-num_places // SHARE), math.ceil(2 * num_places * self.share_of_one))


def _share_of_one(num_groups: int, num_tasks: int) -> float:
    distinct = 1 / num_tasks
    return min(distinct, 2 * (distinct - 1 / num_groups))  # of n groups of T tasks, n * n / 2T coincide


def _add(counts: Counter[Key], key: Key, by: int) -> None:
    counts[key] += by
    if not counts[key]:
        del counts[key]
