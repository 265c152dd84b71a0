"""Timer of generation, learning, and their overlap.

Invariant: every second of an activity is counted once, and once more as "both" where the other went on beside it.
"""

from collections.abc import Generator as PythonGenerator
from contextlib import contextmanager

from swarm.clock import Clock


class Overlap:
    """How many seconds were spent generating, learning, and both at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: set[str] = set()
        self._since_s = clock.monotonic_s()
        self.seconds = {"generate": 0.0, "learn": 0.0, "both": 0.0}

    @contextmanager
    def doing(self, what: str) -> PythonGenerator[None]:
        """Counts the time inside as `what` ("generate" or "learn")."""
        self._account()
        self._active.add(what)
        try:
            yield
        finally:
            self._account()
            self._active.discard(what)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self._account()
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def _account(self) -> None:
        now_s = self._clock.monotonic_s()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        for what in self._active:
            self.seconds[what] += elapsed_s
        if len(self._active) == 2:
            self.seconds["both"] += elapsed_s
