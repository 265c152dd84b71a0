"""Lines on standard error while a command waits, so that nobody takes a slow machine for a hang.

Invariant: from `FIRST_S` on, a line with the present work and the seconds so far comes at least every `EVERY_S`; a fast
command prints none.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import typer

FIRST_S: Final = 4.0
EVERY_S: Final = 8.0


@contextmanager
def waiting(what: str, *, is_quiet: bool = False, say: Callable[[str], None] | None = None) -> Generator["Waiting"]:
    """Context of work without any output of its own.

    Args:
        what: the work, as people name it, such as "loading the model".
        is_quiet: True: nothing is printed, as for a command whose output a program reads.
        say: takes the lines; None: standard error.

    Example:
        with waiting("loading the model") as wait:
            load()
            wait.now("writing the files")
    """
    wait = Waiting(what, say or (lambda line: typer.echo(line, err=True)))
    if not is_quiet:
        wait.start()
    try:
        yield wait
    finally:
        wait.end()


class Waiting:
    """The work that a command waits for, named by a thread of its own."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._began_s = time.monotonic()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def start(self) -> None:
        """Begins to print."""
        self._thread.start()

    def now(self, what: str) -> None:
        """Names the work that goes on now, or its progress."""
        self._what = what

    def end(self) -> None:
        """Ends the lines; none comes after this call."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_S
        while not self._ends.wait(pause_s):
            pause_s = EVERY_S
            self._say(f"{self._what}, {time.monotonic() - self._began_s:.0f} s")
