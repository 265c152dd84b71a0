"""Upload limit: the bytes per second that leave this node for its peers, and who goes first where they are short.

Invariant: in t seconds at most BURST_S + t seconds of bytes leave, and one message more. Givers go first, peer by peer;
those who give nothing have, together, one byte of SHARE while givers wait, and take turns by subnet: keys are free.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from swarm.clock import Clock
from swarm.fairness import FairTable
from swarm.trust_policy import SHARE
from swarm.types import NodeId

BURST_S: Final = 1.0  # of bytes that may leave at once after a silence


class UploadLimit:
    """A token bucket for bytes, with a queue in front.

    Args:
        bytes_per_s: above 0.
        clock: of the node.
        is_giver: whether a peer gives what this node uses.

    Example:
        await limit.take(peer, subnet, response.ByteSize())
        await context.write(response)
    """

    def __init__(
        self, bytes_per_s: int, clock: Clock, is_giver: Callable[[NodeId], bool] = lambda node_id: True
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock, self._is_giver = clock, is_giver
        self._free_at_s = clock.monotonic_s() - BURST_S  # all bytes that were let go have left by then
        # by node id those who give, by subnet all others
        self._waiting = {gives: FairTable[str, _Waiter]() for gives in (True, False)}
        self._owed_bytes = 0  # that givers sent, times their share, ahead of those who give nothing
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, peer: NodeId, subnet: str, num_bytes: int) -> None:
        """Waits until so many bytes may go to a peer, which calls from a subnet."""
        gives = self._is_giver(peer)
        party, waiter = peer if gives else subnet, _Waiter(num_bytes)
        self._waiting[gives].add(party, waiter)
        self._let_go()
        try:
            await waiter.turn
        finally:
            self._waiting[gives].remove(party, waiter)

    def _let_go(self) -> None:
        """Lets go whoever may go now, and comes again when the next one may."""
        now_s = self._clock.monotonic_s()
        self._free_at_s = max(self._free_at_s, now_s - BURST_S)
        while any(self._waiting.values()) and self._free_at_s <= now_s:
            waiter = self._next()
            if not waiter.turn.done():
                self._free_at_s += waiter.num_bytes / self._bytes_per_s
                waiter.turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if any(self._waiting.values()):
            self._timer = asyncio.get_running_loop().call_later(self._free_at_s - now_s, self._let_go)

    def _next(self) -> "_Waiter":
        givers, others = self._waiting[True], self._waiting[False]
        if not (givers and others):
            self._owed_bytes = 0
            table = givers or others
            return table.pop_oldest(next(iter(table.parties)))
        gives = self._owed_bytes <= 0
        waiter = self._waiting[gives].pop_oldest(next(iter(self._waiting[gives].parties)))
        self._owed_bytes += waiter.num_bytes if gives else -(SHARE - 1) * waiter.num_bytes
        return waiter


class _Waiter:
    """A message that waits for its turn."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
