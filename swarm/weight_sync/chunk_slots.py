"""How many chunks of weights a server has in memory at once: a place is held until the last byte has left.

Invariant: at most CHUNKS_TOTAL chunks are being sent and CHUNKS_WAITING calls wait for a place, no peer has more than
CHUNKS_PER_PEER of both; a free place goes to the peer that holds the fewest, in turn, and a peer that has not read its
chunk within the stall timeout loses its place as soon as others wait.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final, cast

from swarm.errors import Unavailable
from swarm.types import NodeId
from swarm.wire.grpc_errors import Context

CHUNKS_PER_PEER: Final = 8  # under way or waiting; with 1 MiB each this fills a line of 80 MB/s at 100 ms
CHUNKS_TOTAL: Final = 32  # of 1 MiB, about three times that with gRPC's copies
CHUNKS_WAITING: Final = 512
CHUNK_STALL_S: Final = 10.0  # 100 kB/s per chunk; slower ones are cut only while others wait


@dataclass(eq=False, slots=True)
class _Call:
    """One chunk that waits for its place, or is on its way."""

    peer: NodeId
    task: "asyncio.Task[Any]"
    turn: "asyncio.Future[None]"  # done once it has a place, or is sent away
    stalled: asyncio.TimerHandle | None = None
    is_late: bool = False
    is_cut: bool = False


class ChunkSlots:
    """Places of one server.

    Example:
        await slots.acquire(peer, context)  # given back when the call has ended
    """

    def __init__(self, stall_timeout_s: float = CHUNK_STALL_S) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._held: dict[_Call, None] = {}  # oldest first
        self._num_held: Counter[NodeId] = Counter()
        self._waiting: dict[NodeId, deque[_Call]] = {}  # the peer whose turn is next comes first

    async def acquire(self, peer: NodeId, context: Context) -> None:
        """Waits for a place, which the call keeps until it has ended.

        Raises:
            Unavailable: the peer asks for too many at a time, or too many calls wait already.
        """
        num_waiting = len(self._waiting.get(peer, ()))
        if self._num_held[peer] + num_waiting >= CHUNKS_PER_PEER:
            raise Unavailable(f"{CHUNKS_PER_PEER} chunks of this peer are under way; ask for fewer at a time")
        if sum(map(len, self._waiting.values())) >= CHUNKS_WAITING:
            self._send_one_away(num_waiting + 1)
        task = asyncio.current_task()
        assert task is not None
        call = _Call(peer, task, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(peer, deque()).append(call)
        self._give_out()
        try:
            await call.turn
        except BaseException:
            self._end(call)
            raise
        # A unary answer is written after its handler has returned: the place is kept until the call has ended.
        cast(Any, context).add_done_callback(lambda _: self._end(call))

    def _send_one_away(self, num_own: int) -> None:
        """The peer with the most calls waiting loses its newest one, where another peer would have fewer even so."""
        most = max(self._waiting.values(), key=len)
        if len(most) <= num_own:
            raise Unavailable(f"{CHUNKS_WAITING} calls wait for chunks; try another holder")
        turn = most.pop().turn
        if not turn.done():
            turn.set_exception(Unavailable("others wait for fewer chunks; ask again, or another holder"))

    def _give_out(self) -> None:
        while self._waiting and len(self._held) < CHUNKS_TOTAL:
            peer = min(self._waiting, key=self._num_held.__getitem__)  # the first one of those with the fewest
            calls = self._waiting.pop(peer)
            call = calls.popleft()
            if calls:
                self._waiting[peer] = calls  # as the last one
            self._held[call] = None
            self._num_held[peer] += 1
            call.stalled = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._is_late, call)
            if not call.turn.done():  # else it was cancelled, and ends in a moment
                call.turn.set_result(None)
        num_waiting = sum(map(len, self._waiting.values()))
        for late in [call for call in self._held if call.is_late][:num_waiting]:
            if not late.is_cut:
                late.is_cut = True
                late.task.cancel()

    def _is_late(self, call: _Call) -> None:
        call.is_late = True
        self._give_out()

    def _end(self, call: _Call) -> None:
        """It ended while it waited or with its place."""
        if call in self._held:
            assert call.stalled is not None
            call.stalled.cancel()
            del self._held[call]
            self._num_held[call.peer] -= 1
            if not self._num_held[call.peer]:
                del self._num_held[call.peer]
            self._give_out()
        elif call in (calls := self._waiting.get(call.peer, deque[_Call]())):
            calls.remove(call)
            if not calls:
                del self._waiting[call.peer]
