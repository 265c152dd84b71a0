"""A broadcast without a lock: whoever waits wakes when it fires.

Invariant: `fire` never waits and wakes exactly those who wait at that moment; a waiter checks its
condition again afterwards. Single event loop, no threads.
"""

import asyncio
from collections.abc import Callable


class Signal:
    """Something changed; look again.

    Example:
        signal = Signal()
        await signal.until(lambda: queue.is_ready)  # in one task
        signal.fire()  # in another
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], bool] | None] = {}  # in order of arrival

    def fire(self) -> None:
        """Wakes every waiter whose condition holds, and those without one."""
        waiters, self._waiters = self._waiters, {}
        for waiter, holds in waiters.items():
            if waiter.done():
                continue
            if holds is not None and not holds():
                self._waiters[waiter] = holds  # sleeps on: waking a task costs more than asking
            else:
                waiter.set_result(None)

    async def wait(self, holds: Callable[[], bool] | None = None) -> None:
        """Waits for the next `fire`, or for the next one at which `holds()`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = holds
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds()`, which is asked now, at each `fire` and before it returns."""
        while not holds():
            await self.wait(holds)
