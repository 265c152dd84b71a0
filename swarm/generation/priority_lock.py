"""Lock with priority, so that a loop that takes it again and again cannot starve another caller.

Invariant: once a caller with `first` holds the turnstile, it gets the lock next, however often others ask for it.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class PriorityLock:
    """Lock that guards weights: `generate` holds it for one token at a time, a replacement takes it with `first`.

    Example:
        with lock.held():
            decoding.step(version)
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()  # a caller with `first` keeps it, so that later callers wait for it
        self._lock = threading.Lock()

    @contextmanager
    def held(self, *, first: bool = False) -> Generator[None]:
        """Holds the lock for the block (blocking); with `first`, later callers cannot get ahead."""
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
