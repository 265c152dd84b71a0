"""HTTP server: uvicorn in its own thread, beside a node's worker or alone.

Invariant: a stopped server no longer listens, and its thread has ended. Connections without a complete request are
bounded in number and time: a new connection replaces the oldest one of the subnet that has the most, so that clients
that send requests are answered.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterable
from typing import Any, ClassVar, Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.addresses import subnet_of
from swarm.errors import ConfigError, TooLarge
from swarm.fairness import FairTable

MAX_CONNECTIONS: Final = 1024
MAX_SILENT: Final = 256  # connections without a request
SILENT_PER_SUBNET: Final = 64
HEAD_S: Final = 5.0  # for the head of a request, since the connection was opened or the previous answer ended
BODY_S: Final = 30.0  # between two parts of a body
MAX_SENDING: Final = 512  # connections whose body is incomplete: half of all
_END_TIMEOUT_S: Final = 2  # for answers in progress


class _BoundedProtocol(H11Protocol):
    """A connection, listed in `silent` or `sending` of its server until its request is complete."""

    silent: ClassVar[FairTable[str, "_BoundedProtocol"]]  # of one server, by subnet
    sending: ClassVar[FairTable[str, "_BoundedProtocol"]]  # whose body is incomplete
    _subnet = ""
    _table: "FairTable[str, _BoundedProtocol] | None" = None  # that it is in
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._subnet = subnet_of(self.client[0]) if self.client else ""
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def _look(self) -> None:
        """Moves this connection to `silent`, to `sending`, or out of both, by the state of its request."""
        cycle = cast("Any", self.cycle)  # None before the first request
        is_asked = cycle is not None and not cycle.response_complete
        is_whole = self.transport.is_closing() or (is_asked and not getattr(cycle, "more_body", False))
        table = None if is_whole else self.sending if is_asked else self.silent
        if table is not self._table:
            self._leave()
            if table is None:
                return
            if not is_asked and len(table.of(self._subnet)) >= SILENT_PER_SUBNET:
                table.oldest(self._subnet).cut()
            elif len(table) >= (MAX_SENDING if is_asked else MAX_SILENT):
                table.oldest_of_longest().cut()
            table.add(self._subnet, self)
            self._table = table
            self._end = self.loop.call_later(BODY_S if is_asked else HEAD_S, self.cut)
        elif is_asked and self._end is not None:
            self._end.cancel()
            self._end = self.loop.call_later(BODY_S, self.cut)

    def _leave(self) -> None:
        if self._table is not None:
            self._table.remove(self._subnet, self)
            self._table = None
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def cut(self) -> None:
        """Closes the connection without an answer."""
        self._leave()
        self.transport.abort()


class HttpServer:
    """Server of an ASGI application, to be started once.

    Example:
        server = HttpServer(app)
        port = server.start("127.0.0.1", 0)
        server.stop()
    """

    def __init__(self, app: Any) -> None:
        tables = {name: FairTable[str, _BoundedProtocol]() for name in ("silent", "sending")}
        config = uvicorn.Config(
            app,
            http=type("_Protocol", (_BoundedProtocol,), tables),
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=_END_TIMEOUT_S,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> int:
        """Starts the server and returns its port. Raises ConfigError if it cannot listen on this address."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; free the port or choose another") from None
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name=f"http on {port}", daemon=True
        )
        self._thread.start()
        return int(listener.getsockname()[1])

    def stop(self) -> None:
        """Stops the server (blocking); answers in progress get _END_TIMEOUT_S to end."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None


async def read_body(parts: AsyncIterable[bytes], max_bytes: int) -> bytes:
    """Reads the body of a request. Raises TooLarge as soon as it exceeds `max_bytes`."""
    read: list[bytes] = []
    num_bytes = 0
    async for part in parts:
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"body: more than {max_bytes} bytes")
        read.append(part)
    return b"".join(read)
