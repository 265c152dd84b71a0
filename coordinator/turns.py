"""Turns by subnet: who sends much waits for itself, who sends little waits for one of each other at most.

Invariant: waiters are bounded per subnet and in all; where all places are taken, the subnet with most loses one.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from swarm.errors import Unavailable

WAITING_PER_SUBNET: Final = 128  # the nodes behind one address report together after a pause
WAITING: Final = 1024


class SubnetTurns:
    """Lets one caller at a time through, the subnets in turn. Single event loop, no threads.

    Example:
        async with turns.of("1.2.3.0/24"):
            ...  # nobody else is in here
    """

    def __init__(self, per_subnet: int = WAITING_PER_SUBNET, total: int = WAITING) -> None:
        self._per_subnet = per_subnet
        self._total = total
        self._num_waiting = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn is next comes first
        self._is_taken = False

    @asynccontextmanager
    async def of(self, subnet: str) -> AsyncGenerator[None]:
        """Waits for a turn of this subnet. Raises Unavailable at the bounds, or when it has to make room."""
        if self._is_taken:
            await self._wait(subnet)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, subnet: str) -> None:
        own = self._waiting.get(subnet, ())
        if len(own) >= self._per_subnet:
            raise Unavailable(f"{len(own)} calls of {subnet} wait already; try again later")
        if self._num_waiting >= self._total:
            self._make_room(len(own) + 1)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(subnet, deque()).append(waiter)
        self._num_waiting += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if not self._remove(subnet, waiter) and waiter.done() and waiter.exception() is None:
                self._pass_on()  # its turn had come: the next one takes it
            raise

    def _make_room(self, num_own: int) -> None:
        most = max(self._waiting, key=lambda subnet: len(self._waiting[subnet]))
        if len(self._waiting[most]) <= num_own:
            raise Unavailable(f"{self._num_waiting} calls wait already; try again later")
        waiter = self._waiting[most][-1]
        self._remove(most, waiter)
        waiter.set_exception(Unavailable("others have fewer calls waiting; try again later"))

    def _remove(self, subnet: str, waiter: "asyncio.Future[None]") -> bool:
        own = self._waiting.get(subnet)
        if own is None or waiter not in own:
            return False
        own.remove(waiter)
        self._num_waiting -= 1
        if not own:
            del self._waiting[subnet]
        return True

    def _pass_on(self) -> None:
        self._is_taken = bool(self._waiting)
        if not self._waiting:
            return
        subnet, own = self._waiting.popitem(last=False)
        waiter = own.popleft()
        self._num_waiting -= 1
        if own:
            self._waiting[subnet] = own  # behind the others
        waiter.set_result(None)
