"""Bytes that a relay passes in a second, shared among those for whom it passes them.

Invariant: parties that wait pass in the order of their tags, whatever others ask for; a cancelled wait costs nothing.
"""

import asyncio
import heapq
import itertools
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable

MAX_PARTIES: Final = 8192


class ByteBudget:
    """Bytes that pass in a second, in equal shares of those who wait: start-time fair queueing.

    A caller with many connections has the share of one; the callers of a subnet together have at most that of
    CALLERS_PER_SUBNET.

    Example:
        budget = ByteBudget(clock, bytes_per_s=2**20, burst_bytes=2**18)
        await budget.take(len(data), caller, subnet)

    Source: Goyal, Vin and Cheng, Start-time Fair Queuing, SIGCOMM 1996.
    """

    LEAST_BYTES: Final = 2048  # that a frame counts: handling one costs as much as copying some KiB
    CALLERS_PER_SUBNET: Final = 8
    # So far a party may fall behind and catch up: its next frame comes only after the last one was written.
    CATCH_UP_BYTES: Final = 2**18

    def __init__(self, clock: Clock, bytes_per_s: float, burst_bytes: float) -> None:
        self._clock, self._bytes_per_s, self._burst_s = clock, bytes_per_s, burst_bytes / bytes_per_s
        self._due_s = clock.monotonic_s() - self._burst_s  # when all that was taken has passed at this rate
        self._now = 0.0  # start tag, in bytes of one party, of what passed last
        self._tags = BoundedTable[str, float](MAX_PARTIES)  # of a party's next frame
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []  # heap: tag, number, bytes
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    async def take(self, num_bytes: int, caller: str, subnet: str) -> None:
        """Waits until there is room for so many bytes, and it is this caller's turn."""
        room = self.ask(num_bytes, caller, subnet)
        if room is not None:
            await room

    def ask(self, num_bytes: int, caller: str, subnet: str) -> asyncio.Future[None] | None:
        """As `take`: what to wait for, None where they may pass at once. A cancelled one takes nothing."""
        size = max(num_bytes, self.LEAST_BYTES)
        tag = self._tag(size, caller, subnet)
        self.num_bytes += num_bytes
        if not self._waiting and self._due_s <= self._clock.monotonic_s():
            self._pass(tag, size)
            return None
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (tag, next(self._numbers), size, room))
        if self._timer is None:
            self._wait()
        return room

    def _tag(self, size: int, caller: str, subnet: str) -> float:
        earliest = self._now - self.CATCH_UP_BYTES
        of_subnet = self._tags.get(subnet, earliest)
        tag = max(earliest, self._tags.get(caller, earliest), of_subnet)
        self._tags[caller] = tag + size
        self._tags[subnet] = max(earliest, of_subnet) + size / self.CALLERS_PER_SUBNET
        return tag

    def _pass(self, tag: float, size: int) -> None:
        now_s = self._clock.monotonic_s()
        self._now = max(self._now, tag)
        self._due_s = max(self._due_s, now_s - self._burst_s) + size / self._bytes_per_s

    def _wait(self) -> None:
        delay_s = max(0.0, self._due_s - self._clock.monotonic_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._grant)

    def _grant(self) -> None:
        self._timer = None
        while self._waiting and self._due_s <= self._clock.monotonic_s():
            tag, _, size, room = heapq.heappop(self._waiting)
            if not room.done():  # else its connection ended
                self._pass(tag, size)
                room.set_result(None)
        if self._waiting:
            self._wait()
