"""Attacker that holds many connections open and opens again what is cut, for tests and `benchmarks.heartbeat_flood`.

Invariant: all of it happens in a thread of its own and ends with the `with` block.
"""

import itertools
import resource
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from swarm.flow import TokenBucket
from tests.attacks.call_flood import client_context

_OPENED_AT_ONCE: Final = 256
_TLS_TIMEOUT_S: Final = 5.0
HALF_CLIENT_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)


def loopback_addresses(num: int) -> list[str]:
    """Addresses of 127/8 other than 127.0.0.1: each stands for a subnet of its own."""
    return [f"127.{1 + number // 62500}.{number // 250 % 250}.{2 + number % 250}" for number in range(num)]


def allow_open_files(num: int) -> None:
    """Raises the soft limit of this process's open files to `num`, as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num if hard == resource.RLIM_INFINITY else min(num, hard), hard))


class ConnectionFlood:
    """Holds `num` connections to one server, from each source address in turn.

    Example:
        with ConnectionFlood("127.0.0.1:4001", loopback_addresses(100), 5000) as flood:
            flood.until_all_were_opened()
    """

    def __init__(
        self,
        endpoint: str,
        sources: Sequence[str],
        num: int,
        greeting: bytes = b"",
        use_tls: bool = False,
        reopened_per_s: float = 1e9,
    ) -> None:
        """`greeting`: what each connection sends at first; `use_tls`: a whole TLS handshake, and then nothing."""
        host, _, port = endpoint.rpartition(":")
        self._server = (host, int(port))
        self._sources = itertools.cycle(sources)
        self._num = num
        self._greeting = greeting
        self._tls = client_context() if use_tls else None
        self._reopened = TokenBucket(reopened_per_s, max(1.0, reopened_per_s / 20), time.monotonic())
        self._selector = selectors.DefaultSelector()
        self._is_ended = threading.Event()
        self._were_opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connection flood", daemon=True)
        self.num_opened = 0
        self.num_cut = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ended.set()
        self._thread.join()

    def until_all_were_opened(self, timeout_s: float = 60.0) -> None:
        """Waits until `num` connections were opened; some may be cut by then."""
        if not self._were_opened.wait(timeout_s):
            raise TimeoutError(f"{self.num_opened} of {self._num} connections within {timeout_s} s")

    @property
    def num_held(self) -> int:
        """Connections that are open at this end."""
        return self.num_opened - self.num_cut

    def _run(self) -> None:
        try:
            while not self._is_ended.is_set():
                for _ in range(min(_OPENED_AT_ONCE, self._num - self.num_held)):
                    if self.num_opened < self._num or self._reopened.try_take(time.monotonic()):
                        self._open()
                if self.num_opened >= self._num:
                    self._were_opened.set()
                self._read(0.0 if self.num_opened < self._num else 0.005)
        finally:
            for key in list(self._selector.get_map().values()):
                key.data.close()
            self._selector.close()

    def _open(self) -> None:
        connection = socket.socket()
        try:
            connection.bind((next(self._sources), 0))
            connection.settimeout(_TLS_TIMEOUT_S)
            connection.connect(self._server)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection)
            connection.sendall(self._greeting)
            connection.setblocking(False)
        except OSError:  # cut at once
            connection.close()
            self.num_opened += 1
            self.num_cut += 1
            return
        self.num_opened += 1
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            connection: socket.socket = key.data
            try:
                is_open = bool(connection.recv(65536))
            except (BlockingIOError, ssl.SSLWantReadError):
                is_open = True
            except OSError:
                is_open = False
            if not is_open:
                self._selector.unregister(connection)
                connection.close()
                self.num_cut += 1
