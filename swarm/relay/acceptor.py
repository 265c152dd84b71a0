"""Sockets that a listening one accepts, a few in a turn of the event loop.

Invariant: each is given to its taker in the turn in which it was accepted, so that none is ever left to nobody. The
servers of asyncio leave one that they accept as they are closed.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

_IN_A_TURN: Final = 16  # with one, a thousand that connect in a second keep others out of the queue of a busy process
_AGAIN_S: Final = 1.0  # where no file is free: what waits stays in the kernel's queue


class Acceptor:
    """Accepts sockets from `start` to `close`.

    Args:
        listening: a socket that listens; closed with this.
        take: given each socket.
    """

    def __init__(self, listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._listening, self._take = listening, take
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listening.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether it is not closed."""
        return self._listening.fileno() >= 0

    def start(self) -> None:
        """Begins to accept."""
        self._again = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_IN_A_TURN):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file is free
                self._loop.remove_reader(self._listening)
                self._again = self._loop.call_later(_AGAIN_S, self.start)
                return
            self._take(connection)

    def close(self) -> None:
        """Ends it; idempotent. Who was not accepted yet is turned away."""
        if self._again is not None:
            self._again.cancel()
        if self.is_open:
            self._loop.remove_reader(self._listening)
            self._listening.close()
