"""Lock with priority, so that a loop that takes it again and again cannot starve the one who waits.

Invariant: a caller that waits with `first` holds it next, however often others ask.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class PriorityLock:
    """Guards weights: held for each token by a long call of generate, and with `first` by who replaces them.

    Example:
        with lock.held():
            decoding.step(version)
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()  # held by one who waits with `first`, so that others wait behind it
        self._lock = threading.Lock()

    @contextmanager
    def held(self, *, first: bool = False) -> Generator[None]:
        """Holds the lock (blocking)."""
        if first:
            with self._turnstile, self._lock:
                yield
            return
        with self._turnstile:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()
