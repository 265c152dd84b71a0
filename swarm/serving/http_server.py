"""uvicorn in a thread of its own, beside a node's worker or alone.

Invariant: a server that was stopped listens no more, and has no thread left.
"""

import socket
import threading
from collections.abc import AsyncIterable
from typing import Any, Final

import uvicorn

from swarm.errors import ConfigError, TooLarge

MAX_CONNECTIONS: Final = 1024
_END_TIMEOUT_S: Final = 2  # for answers under way


class HttpServer:
    """Serves an ASGI application.

    Example:
        server = HttpServer(app)
        port = server.start("127.0.0.1", 0)
        server.stop()
    """

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
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
        """Listens; returns the port. Raises ConfigError: nothing can listen there."""
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
        """Ends it (blocking); answers under way have 2 s."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None


async def read_body(parts: AsyncIterable[bytes], max_bytes: int) -> bytes:
    """A request's body. Raises TooLarge as soon as it is more than `max_bytes`."""
    read: list[bytes] = []
    num_bytes = 0
    async for part in parts:
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"body: more than {max_bytes} bytes")
        read.append(part)
    return b"".join(read)
