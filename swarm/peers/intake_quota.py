"""How much foreign experience a node has use for: half as much again as its draws take, not the whole swarm's.

Invariant: a node that holds fewer external groups than one draw may take refuses nobody, and however much one
neighbour sends, it cannot use up the share of another.
"""

from dataclasses import dataclass
from typing import Final

from swarm.clock import Clock
from swarm.config import ReplayConfig
from swarm.types import NodeId

MAX_SHARES: Final = 256  # neighbours remembered; there are never more than 64 at a time
_SURPLUS: Final = 1.5  # groups taken in for each one that a draw takes: some are refused, some come too late
_MEMORY: Final = 0.8  # share of the old figure in the running mean of the time between draws


@dataclass(slots=True)
class _Share:
    """What one neighbour may still send."""

    groups: float
    at_s: float  # monotonic time up to which `groups` was filled


class IntakeQuota:
    """Says of each group that a neighbour offers whether this node takes it in: one token bucket per neighbour.

    A draw takes up to J external groups, so a node of N that took in every group of every other would check N * I of
    them per step and learn from J. This one takes in about 1.5 * J per draw, spread evenly over the time between its
    draws: a slow learner still finds young groups, and keeps hearing of its producers' heads. Until the time between
    draws is known, everything is taken.

    Example:
        appetite = Appetite(config.replay, clock)
        if appetite.take(peer, num_neighbours=4, num_held=7): ...
    """

    def __init__(self, config: ReplayConfig, clock: Clock) -> None:
        self._num_per_draw = config.external_groups
        self._burst = (config.max_age_steps + 1) * config.external_groups  # what the draws of one group's life can take
        self._is_boundless = config.barrier  # a synchronous step waits for every neighbour's newest group
        self._clock = clock
        self._drew_at_s: float | None = None
        self._interval_s: float | None = None  # mean time between draws
        self._shares: dict[NodeId, _Share] = {}

    def drew(self) -> None:
        """A draw was made."""
        now_s = self._clock.monotonic_s()
        if self._drew_at_s is not None:
            last_s, mean_s = now_s - self._drew_at_s, self._interval_s
            self._interval_s = last_s if mean_s is None else _MEMORY * mean_s + (1 - _MEMORY) * last_s
        self._drew_at_s = now_s

    def take(self, via: NodeId, num_neighbours: int, num_held: int) -> bool:
        """Whether one more group from this neighbour is worth fetching and checking; it is then counted.

        Args:
            via: the neighbour.
            num_neighbours: connected now, >= 1.
            num_held: external groups that wait for a draw.
        """
        if self._is_boundless or self._interval_s is None:
            return True
        share = self._filled(via, num_neighbours, self._interval_s)
        if share.groups < 1.0 and num_held >= self._num_per_draw:
            return False
        share.groups = max(0.0, share.groups - 1.0)
        return True

    def _filled(self, via: NodeId, num_neighbours: int, interval_s: float) -> _Share:
        """The neighbour's share, filled up to now."""
        now_s, most = self._clock.monotonic_s(), max(1.0, self._burst / num_neighbours)
        share = self._shares.get(via)
        if share is None:
            share = self._shares[via] = _Share(groups=most, at_s=now_s)
            if len(self._shares) > MAX_SHARES:
                del self._shares[next(iter(self._shares))]
        assert self._drew_at_s is not None
        late_s = max(interval_s, now_s - self._drew_at_s, 1e-6)  # a learner that stopped needs ever less
        per_s = _SURPLUS * self._num_per_draw / (num_neighbours * late_s)
        share.groups = min(most, share.groups + (now_s - share.at_s) * per_s)
        share.at_s = now_s
        return share
