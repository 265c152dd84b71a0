"""A lock that a busy loop cannot keep to itself.

Invariant: who waits with `first` is served before anybody who asks after it, however often others ask.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class PriorityLock:
    """Guards weights: taken for each token by a call that goes on for long, and `first` by who replaces them.

    Example:
        with turns.taken():
            decoding.step(version)
    """

    def __init__(self) -> None:
        self._admission = threading.Lock()  # held by one who waits with `first`, so that others wait behind it
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, *, first: bool = False) -> Generator[None]:
        """Holds the lock (blocking)."""
        if first:
            with self._admission, self._lock:
                yield
            return
        with self._admission:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()
