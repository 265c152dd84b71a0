"""Reports a worker's activity to its agent, once a second at most.

Invariant: only work that advanced is reported; where nothing advances, nothing is sent.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from swarm.activity import Activity, Tell
from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.interfaces import LocalExchange

EVERY_S: Final = 1.0  # status.json, which shows it, is written as often


@asynccontextmanager
async def reporting(exchange: LocalExchange, clock: Clock) -> AsyncGenerator[Tell]:
    """A `Tell` whose newest activity reaches the agent while the context lasts.

    Example:
        async with reporting(client, SystemClock()) as tell:
            tell("loading the model")
    """
    loop, has_advanced = asyncio.get_running_loop(), asyncio.Event()
    newest: Activity | None = None

    def tell(what: str, done: int = 0, total: int = 0, num_tokens: int = 0) -> None:
        nonlocal newest
        newest = Activity(what=what, done=done, total=total, num_tokens=num_tokens, at_s=clock.now_s())
        if not has_advanced.is_set() and not loop.is_closed():
            loop.call_soon_threadsafe(has_advanced.set)

    async def report() -> None:
        while True:
            await has_advanced.wait()
            has_advanced.clear()
            assert newest is not None
            try:
                await exchange.report_activity(newest)
            except Unavailable:
                return  # the agent is gone, which the worker's own calls find
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(report(), name="activity")
    try:
        yield tell
    finally:
        task.cancel()
        await asyncio.wait([task])
