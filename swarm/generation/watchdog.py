"""Watchdog: ends the process when native code blocks for too long, so that its supervisor can start another.

Invariant: the bound holds whatever the interpreter is doing, also where something never gives its lock back.
"""

import faulthandler
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Generator[None]:
    """Ends the process, with a traceback of every thread on stderr, if the block takes longer. Not to be nested.

    Example:
        with at_most(600.0):
            engine.step()
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
