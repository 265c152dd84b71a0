"""Turns by subnet: who sends much waits for itself, who sends little waits for one of each other at most.

Invariant: waiters are bounded per subnet and in all; where all places are taken, the subnet with most loses one.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from swarm.errors import Unavailable
from swarm.fairness import FairTable

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
        self._waiting = FairTable[str, asyncio.Future[None]]()
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
        num_own = len(self._waiting.of(subnet))
        if num_own >= self._per_subnet:
            raise Unavailable(f"{num_own} calls of {subnet} wait already; try again later")
        if len(self._waiting) >= self._total:
            self._make_room(subnet)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(subnet, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            was_waiting = self._waiting.remove(subnet, waiter)
            if not was_waiting and not waiter.cancelled() and waiter.exception() is None:
                self._pass_on()  # its turn had come: the next one takes it
            raise

    def _make_room(self, subnet: str) -> None:
        most = self._waiting.longest(beside=subnet)
        if most is None:
            raise Unavailable(f"{len(self._waiting)} calls wait already; try again later")
        waiter = self._waiting.newest(most)
        self._waiting.remove(most, waiter)
        if not waiter.done():  # else it was cancelled, and does not know it yet
            waiter.set_exception(Unavailable("others have fewer calls waiting; try again later"))

    def _pass_on(self) -> None:
        while self._waiting:
            waiter = self._waiting.pop_oldest(next(iter(self._waiting.parties)))
            if not waiter.done():  # else it was cancelled, and does not know it yet
                waiter.set_result(None)
                return
        self._is_taken = False
