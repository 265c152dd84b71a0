"""One connection of the in-memory network, and the items in flight on its streams.

Invariant: every wait on a connection wakes when it is cut; a stream keeps its order, except for items made late.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

from swarm.errors import Unavailable
from swarm.types import NodeId

Item = TypeVar("Item")

WINDOW = 8  # items in flight on one stream before its sender has to wait


class Cuts(Protocol):
    """What a line has to know of its network."""

    def next_cut_s(self, a: NodeId, b: NodeId) -> float:
        """Seconds until the next partition between the two begins; 0 during one, inf when none is planned."""
        ...

    def attach(self, line: "Line") -> None:
        """Remembers an open connection under both its ends."""
        ...

    def detach(self, line: "Line") -> None:
        """Forgets a closed connection."""
        ...


class Line:
    """One open connection: whatever waits on it wakes when it is cut, as it is when a partition begins."""

    def __init__(self, network: Cuts, client: NodeId, server: NodeId) -> None:
        self._network, self.client, self.server = network, client, server
        self._loop = asyncio.get_running_loop()
        self._reason = ""  # why it broke; empty while it holds
        self._wakers: dict[object, Callable[[], None]] = {}
        until_cut_s = network.next_cut_s(client, server)
        self._partition = None if math.isinf(until_cut_s) else self._loop.call_later(until_cut_s, self.cut, "partition")
        network.attach(self)

    def cut(self, reason: str) -> None:
        """Breaks the connection; idempotent."""
        if self._reason:
            return
        self._reason = reason
        if self._partition is not None:
            self._partition.cancel()
        self._network.detach(self)
        for wake in list(self._wakers.values()):
            wake()

    def check(self) -> None:
        """Raises Unavailable when the connection is broken."""
        if self._reason:
            raise Unavailable(f"connection to {self.server[:8]} broke: {self._reason}")

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Generator[None]:
        """Calls `wake` if the connection breaks within. Raises Unavailable when it is broken already."""
        self.check()
        key = object()
        self._wakers[key] = wake
        try:
            yield
        finally:
            del self._wakers[key]

    async def wait(self, seconds: float) -> None:
        """Lets time pass on an open connection. Raises Unavailable as soon as it breaks."""
        if seconds > 0:
            self.check()
            waiter: asyncio.Future[None] = self._loop.create_future()
            timer = self._loop.call_later(seconds, _wake, waiter)
            self._wakers[waiter] = partial(_wake, waiter)
            try:
                await waiter
            finally:
                del self._wakers[waiter]
                timer.cancel()
        self.check()


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class UnderWay(Generic[Item]):
    """What was sent on one stream and is not yet read: a sender waits for room, a reader for arrivals."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._travelling: deque[tuple[float, Item | Exception]] = deque()  # loop time of arrival, ascending
        self._timer: asyncio.TimerHandle | None = None  # of the first of them
        self._arrived: deque[Item | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._num_free = WINDOW
        self._sender: asyncio.Future[None] | None = None
        self._late: dict[int, asyncio.TimerHandle] = {}
        self._num_late = 0

    def send(self, item: Item, at_s: float) -> None:
        """The item arrives at `at_s` (loop time), behind all that was sent before it."""
        self._num_free -= 1
        if not self._travelling and at_s <= self._loop.time():
            self._arrive(item)
            return
        self._travelling.append((at_s, item))
        if self._timer is None:
            self._timer = self._loop.call_at(at_s, self._land)

    def send_late(self, item: Item, at_s: float) -> None:
        """The item arrives at `at_s` (loop time), whatever arrives before it."""
        self._num_free -= 1
        self._num_late += 1
        self._late[self._num_late] = self._loop.call_at(at_s, self._land_late, self._num_late, item)

    def end(self, error: Exception) -> None:
        """Ends the stream after the items in flight; the reader gets the reason."""
        if self._travelling:
            self._travelling.append((self._travelling[-1][0], error))
        else:
            self._arrive(error)

    def break_off(self, error: Exception) -> None:
        """Cuts the stream: the reader gets the error at once."""
        self._arrive(error)

    def stop(self) -> None:
        """Ends the stream from the reader's side."""
        for timer in (*self._late.values(), *([] if self._timer is None else [self._timer])):
            timer.cancel()
        self._arrived.clear()  # an error in it holds the frames that hold this
        self._travelling.clear()

    async def read(self) -> Item | Exception:
        """The next arrival, or why there is none."""
        while not self._arrived:
            self._reader = self._loop.create_future()
            await self._reader
        self._num_free += 1
        if self._sender is not None:
            _wake(self._sender)
        return self._arrived.popleft()

    async def room(self) -> None:
        """Waits until another item may be sent."""
        while self._num_free <= 0:
            self._sender = self._loop.create_future()
            await self._sender
            self._sender = None

    def _land(self) -> None:
        """Everything that has travelled long enough arrives."""
        travelling = self._travelling
        due_s = max(self._loop.time(), travelling[0][0])  # a loop may run a timer a little early
        while travelling and travelling[0][0] <= due_s:
            self._arrive(travelling.popleft()[1])
        self._timer = self._loop.call_at(travelling[0][0], self._land) if travelling else None

    def _land_late(self, number: int, item: Item) -> None:
        del self._late[number]
        self._arrive(item)

    def _arrive(self, what: Item | Exception) -> None:
        self._arrived.append(what)
        if self._reader is not None:
            _wake(self._reader)
