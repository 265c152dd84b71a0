"""How much a neighbour may say in a minute: what its stream costs us to read, whether anything of it is of use or not.

Invariant: a neighbour is never heard more than twice its limit within a minute, however often it connects anew.
"""

from dataclasses import dataclass
from typing import Final

from swarm.clock import Clock
from swarm.peers.peer_table import keep_newest
from swarm.types import NodeId

ITEMS_PER_GROUP: Final = 10  # of what one peer may bring in a minute: it also tells what all others made
_WINDOW_S: Final = 60.0
_MAX_PEERS: Final = 256  # remembered; there are never so many neighbours at a time


@dataclass(slots=True)
class _Said:
    since_s: float  # monotonic
    num_items: int = 0


class StreamQuota:
    """Counts the items of each neighbour's streams. The clock is asked only when the limit is reached.

    Example:
        talk = Talk(clock, groups_per_minute=6000)
        if not talk.take(peer): ...
    """

    def __init__(self, clock: Clock, groups_per_minute: int) -> None:
        self._clock = clock
        self._limit = ITEMS_PER_GROUP * groups_per_minute
        self._said: dict[NodeId, _Said] = {}

    def take(self, peer: NodeId) -> bool:
        """Counts one item; False where there were too many in too short a time."""
        said = self._said.get(peer)
        if said is None:
            said = _Said(self._clock.monotonic_s())
            keep_newest(self._said, peer, said, _MAX_PEERS)
        said.num_items += 1
        if said.num_items <= self._limit:
            return True
        now_s = self._clock.monotonic_s()
        if now_s - said.since_s < _WINDOW_S:
            return False
        said.since_s, said.num_items = now_s, 1
        return True
