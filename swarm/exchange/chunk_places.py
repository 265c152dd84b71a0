"""How many chunks of weights a server has in memory at once: a place is held until the last byte has left.

Invariant: at most CHUNKS_TOTAL chunks are being sent and CHUNKS_WAITING calls wait for a place, no peer has more than
CHUNKS_PER_PEER of both, and a peer that does not read loses its place after the stall timeout.
"""

import asyncio
from collections import Counter
from typing import Any, Final, cast

from swarm.errors import Unavailable
from swarm.types import NodeId
from swarm.wire.status import Context

CHUNKS_PER_PEER: Final = 8  # under way or waiting; with 1 MiB each this fills a line of 80 MB/s at 100 ms
CHUNKS_TOTAL: Final = 32  # of 1 MiB, about three times that with gRPC's copies
CHUNKS_WAITING: Final = 512


class ChunkPlaces:
    """Places of one server.

    Example:
        await places.take(peer, context)  # given back when the call has ended
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._of_peer: Counter[NodeId] = Counter()
        self._free = asyncio.Semaphore(CHUNKS_TOTAL)

    async def take(self, peer: NodeId, context: Context) -> None:
        """Waits for a place, which the call keeps until it has ended.

        Raises:
            Unavailable: the peer asks for too many at a time, or too many calls wait already.
        """
        if self._of_peer[peer] >= CHUNKS_PER_PEER:
            raise Unavailable(f"{CHUNKS_PER_PEER} chunks of this peer are under way; ask for fewer at a time")
        if self._of_peer.total() >= CHUNKS_TOTAL + CHUNKS_WAITING:
            raise Unavailable(f"{CHUNKS_WAITING} calls wait for chunks; try another holder")
        self._of_peer[peer] += 1
        try:
            await self._free.acquire()
        except BaseException:
            self._give_back(peer)
            raise
        self._hold(peer, context)

    def _hold(self, peer: NodeId, context: Context) -> None:
        """Until the call has ended: a unary answer is written after its handler has returned."""
        call = asyncio.current_task()
        assert call is not None
        stalled = asyncio.get_running_loop().call_later(self._stall_timeout_s, call.cancel)

        def ended(_: Any) -> None:
            stalled.cancel()
            self._free.release()
            self._give_back(peer)

        cast(Any, context).add_done_callback(ended)

    def _give_back(self, peer: NodeId) -> None:
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]
