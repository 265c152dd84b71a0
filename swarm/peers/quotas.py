"""Quotas of a neighbour: stream items per minute, and external groups in proportion to what draws consume.

Invariant: a node that holds fewer external groups than one draw may take refuses none, and however much one neighbour
sends, it cannot use up the share of another.
"""

from typing import Final

from swarm.clock import Clock
from swarm.config import ReplayConfig
from swarm.flow import BoundedTable, RateLimiter, RunningMean, TokenBucket
from swarm.trust_policy import ITEMS_PER_GROUP, SURPLUS
from swarm.types import NodeId

GROUPS_PER_MINUTE: Final = 6000  # that one peer may bring, above what any node here makes; more is a flood
MAX_NEIGHBOURS: Final = 256  # remembered; there are never more than 64 at a time
_MEMORY: Final = 0.8  # share of the old figure in the running mean of the time between draws


def stream_quota() -> RateLimiter[NodeId]:
    """Limit of the items on each neighbour's streams, useful or not: at most twice the rate within any minute,
    however often it reconnects."""
    per_minute = float(ITEMS_PER_GROUP * GROUPS_PER_MINUTE)
    return RateLimiter(per_s=per_minute / 60.0, burst=per_minute, max_keys=MAX_NEIGHBOURS)


class IntakeQuota:
    """Limit of the external groups taken in: 1.5 times what draws consume, one token bucket per neighbour.

    A draw takes up to J external groups, so a node of N that took in every group of every other would check N * I of
    them per step and learn from J. This one takes in about 1.5 * J per draw, spread evenly over the time between its
    draws: a slow learner still finds young groups, and keeps learning its producers' heads. Until the time between
    draws is known, everything is taken. Newcomers have an eighth of it beside what the others have.

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
        """Notes the time of a draw."""
        now_s = self._clock.monotonic_s()
        if self._drawn_at_s is not None:
            self._interval_s.add(now_s - self._drawn_at_s)
        self._drawn_at_s = now_s

    def try_take(self, via: NodeId, num_neighbours: int, num_held: int, share: float = 1.0) -> bool:
        """Whether one more group from this neighbour is worth fetching and checking; it is then counted.

        Args:
            via: the neighbour.
            num_neighbours: connected now that share with it, >= 1.
            num_held: external groups of such nodes that wait for a draw.
            share: of the draws that they have together.
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
