"""HTTP server: uvicorn in its own thread, beside a node's worker or alone.

Invariant: a stopped server no longer listens, and its thread has ended.
"""

import socket
import threading
from collections.abc import AsyncIterable
from typing import Any, Final

import uvicorn

from swarm.errors import ConfigError, TooLarge

MAX_CONNECTIONS: Final = 1024
_END_TIMEOUT_S: Final = 2  # for answers in progress


class HttpServer:
    """Server of an ASGI application, to be started once.

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
        """Stops the server (blocking); answers in progress get 2 s to end."""
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
