"""Time as an injected value, so that the same code runs on the system clock and on a virtual one.

Waiting is `asyncio.sleep` or `asyncio.timeout` everywhere: under the virtual event loop of `swarm.simulate` both are
virtual.
"""

import time
from typing import Final, Protocol

CLOCK_SKEW_S: Final = 120.0  # largest difference between the wall clocks of two honest nodes


class Clock(Protocol):
    """Source of the two times that a node needs."""

    def now_s(self) -> float:
        """Wall-clock time, seconds since 1970; comparable between machines up to their clock skew."""
        ...

    def monotonic_s(self) -> float:
        """Monotonic time, seconds; comparable only within this process."""
        ...


class SystemClock:
    """Clock of the operating system."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only by `advance`; for tests.

    Example:
        clock = ManualClock(start_s=1_000.0)
        clock.advance(5.0)
    """

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._start_s = start_s
        self._elapsed_s = 0.0

    def now_s(self) -> float:
        return self._start_s + self._elapsed_s

    def monotonic_s(self) -> float:
        return self._elapsed_s

    def advance(self, seconds: float) -> None:
        """Moves both times forward by `seconds` >= 0."""
        assert seconds >= 0, seconds
        self._elapsed_s += seconds
