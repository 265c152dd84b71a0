"""Byte budget of a relay: the bytes that it forwards in a second, shared among callers.

Invariant: frames that wait are forwarded in the order of their tags, whatever others ask for. A cancelled wait takes
nothing from the budget, but still delays the next frames of its own party.
"""

import asyncio
import heapq
import itertools
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable

MAX_PARTIES: Final = 8192


class ByteBudget:
    """Start-time fair queueing: equal shares for all callers that wait, however many connections each has.

    The callers of one subnet together have at most the share of CALLERS_PER_SUBNET callers.

    Example:
        budget = ByteBudget(clock, bytes_per_s=2**20, burst_bytes=2**18)
        await budget.take(len(data), caller, subnet)

    Source: Goyal, Vin and Cheng, Start-time Fair Queuing, SIGCOMM 1996.
    """

    LEAST_BYTES: Final = 2048  # charged for any frame: handling one costs as much as copying some KiB
    CALLERS_PER_SUBNET: Final = 8
    # A party may lag by this much and catch up: it asks for its next frame only after the last one was written.
    CATCH_UP_BYTES: Final = 2**18

    def __init__(self, clock: Clock, bytes_per_s: float, burst_bytes: float) -> None:
        self._clock, self._bytes_per_s, self._burst_s = clock, bytes_per_s, burst_bytes / bytes_per_s
        self._due_s = clock.monotonic_s() - self._burst_s  # time at which all granted bytes are sent at this rate
        self._now = 0.0  # virtual time: largest start tag of a granted frame, in bytes of one party
        self._tags = BoundedTable[str, float](MAX_PARTIES)  # start tag of each party's next frame
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []  # heap: tag, number, bytes
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    async def take(self, num_bytes: int, caller: str, subnet: str) -> None:
        """Waits until this caller may forward `num_bytes` bytes."""
        room = self.ask(num_bytes, caller, subnet)
        if room is not None:
            await room

    def ask(self, num_bytes: int, caller: str, subnet: str) -> asyncio.Future[None] | None:
        """Returns a future to await before forwarding `num_bytes`; None: now. A cancelled future takes no budget."""
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
            if not room.done():  # its connection may have ended
                self._pass(tag, size)
                room.set_result(None)
        if self._waiting:
            self._wait()
