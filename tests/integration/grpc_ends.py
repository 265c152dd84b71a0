"""The end of what a test opened with gRPC: what outlives its event loop breaks the tests after it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from swarm.wire.connection_limits import ConnectionLimiter


@asynccontextmanager
async def everything_closed() -> AsyncGenerator[None]:
    """Closes at its end the servers and channels that were opened within, also those of a test that failed."""
    ends: list[Callable[[], Awaitable[Any]]] = []

    def noted(make: Callable[..., Any], end: Callable[[Any], Awaitable[Any]]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            opened = make(*arguments, **options)
            ends.append(lambda: end(opened))
            return opened

        return made

    start = ConnectionLimiter.start

    def started(self: ConnectionLimiter, *arguments: Any) -> None:
        start(self, *arguments)
        ends.append(lambda: asyncio.to_thread(self.stop))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc.aio, "server", noted(grpc.aio.server, lambda server: server.stop(None)))
            for name in ("secure_channel", "insecure_channel"):
                patch.setattr(grpc.aio, name, noted(getattr(grpc.aio, name), lambda channel: channel.close()))
            patch.setattr(ConnectionLimiter, "start", started)
            yield
    finally:
        for end in reversed(ends):
            await end()
