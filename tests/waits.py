"""How tests wait: for a condition, for as long as it may take, bounded by hanging alone.

Invariant: the length of a wait is no claim. A duration that is a claim is the product's own bound, and is asserted.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

HANG_S: Final = 240.0  # below pytest's own 300 s, so that a failure says what did not come
PROMPT_S: Final = 60.0  # where a longer bound of the product (a relay idle for 90 s, a stall of 120) would do it too


async def until(
    holds: Callable[[], bool | Awaitable[bool]],
    what: str = "it",
    *,
    beside: "asyncio.Task[Any] | None" = None,
    most_s: float = HANG_S,
) -> None:
    """Waits for what other tasks, threads or processes bring about.

    Args:
        holds: the condition, also as a coroutine function.
        what: it is, for the failure.
        most_s: `PROMPT_S` where a bound of the product is the claim.
        beside: a task that must not end before; its own error is raised where it does.
    """
    end_s = time.monotonic() + most_s
    while True:
        found = holds()
        if await found if inspect.isawaitable(found) else found:
            return
        if beside is not None and beside.done():
            beside.result()
            raise AssertionError(f"the task ended before {what} came: {beside}")
        assert time.monotonic() < end_s, f"{what} did not come within {most_s:g} s of waiting"
        await asyncio.sleep(0.005)
