"""Waits of tests: for a condition, for as long as it may take, bounded by hanging alone.

Invariant: the length of a wait is no claim. A duration that is a claim is the product's own bound, and is asserted.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from swarm.errors import Unavailable
from swarm.interfaces import Reservation
from swarm.simulate.local.processes import Process
from swarm.types import JsonDict

HANG_S: Final = 240.0  # below pytest's own 300 s, so that a failure says what did not come
PROMPT_S: Final = 60.0  # where a longer bound of the product (a relay idle for 90 s, a stall of 120) would do it too


async def until(
    holds: Callable[[], bool | Awaitable[bool]],
    what: str = "it",
    *,
    beside: "asyncio.Task[Any] | None" = None,
    processes: Iterable[Process] = (),
    most_s: float = HANG_S,
) -> None:
    """Waits for what other tasks, threads or processes bring about.

    Args:
        holds: the condition, also as a coroutine function.
        what: comes then, or does not, for the failure.
        most_s: `PROMPT_S` where a bound of the product is the claim.
        beside: a task that must not end before; its own error is raised where it does.
        processes: must not die before, unless they are expected to.
    """
    end_s = time.monotonic() + most_s
    while True:
        found = holds()
        if await found if inspect.isawaitable(found) else found:
            return
        for process in processes:
            process.check()
        if beside is not None and beside.done():
            beside.result()
            raise AssertionError(f"the task ended before {what} came: {beside}")
        assert time.monotonic() < end_s, f"waited {most_s:g} s for this: {what}"
        await asyncio.sleep(0.005)


def has_ended(process: psutil.Process | int) -> bool:
    """True for a process that runs no more, also while whoever adopted it has yet to collect its exit code."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def hold(reservation: Reservation) -> "asyncio.Task[None]":
    """The task that holds a reservation, once it is held: it is asked for again where a busy machine was late."""
    error: BaseException | None = None
    for _ in range(60):
        holding, held = asyncio.ensure_future(reservation.hold()), asyncio.ensure_future(reservation.held.wait())
        await asyncio.wait({holding, held}, return_when=asyncio.FIRST_COMPLETED)
        if held.done():
            return holding
        held.cancel()
        error = holding.exception()
        assert isinstance(error, Unavailable), holding
        await asyncio.sleep(0.1)
    raise AssertionError(f"it is not held: {error}")


async def written(path: Path, process: Process) -> JsonDict:
    """A JSON file, once another process has written it."""
    await until(path.exists, f"{path.name} of {process.name}", processes=(process,))
    return json.loads(await asyncio.to_thread(path.read_text))
