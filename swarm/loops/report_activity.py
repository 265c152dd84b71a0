"""Reports a worker's activity to its agent, once a second at most.

Invariant: only work that advanced is reported. A generator that waits does not hide a learner that is stuck, nor the
other way round.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

from swarm.activity import OF_GENERATOR, OF_START, WAITING, Activity, OnProgress
from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.interfaces import LocalExchange

EVERY_S: Final = 1.0  # status.json, which shows it, is written as often


@asynccontextmanager
async def reporting(exchange: LocalExchange, clock: Clock) -> AsyncGenerator[OnProgress]:
    """Yields an `OnProgress`, whose newest activity is reported to the agent while the context lasts.

    Example:
        async with reporting(client, SystemClock()) as on_progress:
            on_progress("loading the model")
    """
    loop, has_advanced = asyncio.get_running_loop(), asyncio.Event()
    newest: dict[str, Activity] = {}  # of the start, of the generator, and of the learner

    def on_progress(what: str, done: int = 0, total: int = 0, num_tokens: int = 0) -> None:
        activity = Activity(what=what, done=done, total=total, num_tokens=num_tokens, at_s=clock.now_s())
        part = "start" if what in OF_START else "generator" if what in OF_GENERATOR else "learner"
        if part != "start":
            newest.pop("start", None)
        newest[part] = activity
        if not has_advanced.is_set() and not loop.is_closed():
            loop.call_soon_threadsafe(has_advanced.set)

    async def report() -> None:
        while True:
            await has_advanced.wait()
            has_advanced.clear()
            with suppress(Unavailable):  # an agent that is gone is found by the worker's own calls
                await exchange.report_activity(_shown([*newest.values()]))
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(report(), name="activity")
    try:
        yield on_progress
    finally:
        task.cancel()
        await asyncio.wait([task])


def _shown(activities: list[Activity]) -> Activity:
    """The newest activity that is no wait; if all are waits, the newest."""
    working = [each for each in activities if not each.what.startswith(WAITING)]
    return max(working or activities, key=lambda each: each.at_s)
