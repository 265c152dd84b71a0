"""The two ends of a relayed connection, and bytes from one to the other.

Invariant: nothing is kept but what is under way; whoever reads slowly holds back the other end, and where one direction
ends the other does.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import grpc

from swarm.errors import Unavailable

FRAME_BYTES: Final = 60 * 1024  # at once: a request of a server has at most 64 KiB (`ServerLimits`)
SOCKET_BYTES: Final = 256 * 1024  # that the kernel keeps of each direction of a socket: else it grows to megabytes
FINISH_S: Final = 10.0  # for the other side to read what was written, once nothing more comes
EOF: Final = cast(Any, grpc.aio).EOF  # what a read of a call gives at its end
_TURN_AWAY_AT_ONCE: Final = b"\1\0\0\0\0\0\0\0"  # of SO_LINGER: on, 0 s


class End(Protocol):
    """One end of a connection."""

    async def read(self) -> bytes:
        """What comes next, at most FRAME_BYTES; empty where nothing comes any more. Raises OSError."""
        ...

    async def write(self, data: bytes) -> None:
        """Waits until there is room. Raises OSError where nobody takes it."""
        ...

    async def finish(self) -> None:
        """Nothing more is written: waits until the other side has read all, for a while."""
        ...

    def close(self) -> None:
        """Ends it at once; idempotent."""
        ...


class SocketEnd:
    """A connected socket.

    Streams of asyncio copy each byte twice more, and would keep a relay from 70 % of what a direct connection gives.
    """

    def __init__(self, connection: socket.socket, *, is_bounded: bool = False) -> None:
        """`is_bounded`: the kernel keeps at most SOCKET_BYTES of each direction."""
        connection.setblocking(False)
        with suppress(OSError):  # the other side is gone
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_bounded:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._socket, self._loop = connection, asyncio.get_running_loop()

    async def read(self, most: int = FRAME_BYTES) -> bytes:
        """See `End`."""
        return await self._loop.sock_recv(self._socket, most)

    async def write(self, data: bytes) -> None:
        """See `End`."""
        await self._loop.sock_sendall(self._socket, data)

    async def finish(self) -> None:
        """See `End`."""
        with suppress(OSError, TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(FINISH_S):
                while await self.read():
                    pass

    def close(self) -> None:
        """See `End`. What nobody read is dropped: the kernel would keep it for minutes, beside all bounds."""
        with suppress(OSError):  # it is closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _TURN_AWAY_AT_ONCE)
        self._socket.close()


class CallEnd:
    """A call to a relay whose messages carry bytes.

    Args:
        call: whose requests and responses have `data`.
        request: their kind.
        what: the call, for messages.
    """

    def __init__(self, call: Any, request: Callable[..., Any], what: str) -> None:
        self._call, self._request, self._what = call, request, what

    async def read(self) -> bytes:
        """See `End`. Raises as gRPC, or Unavailable."""
        response = await self._call.read()
        if response is EOF:
            return b""
        if len(response.data) > FRAME_BYTES:
            num = len(response.data)
            raise Unavailable(f"{self._what}: {num} bytes in a frame, expected at most {FRAME_BYTES}")
        return bytes(response.data)

    async def write(self, data: bytes) -> None:
        """See `End`. Raises as gRPC, or Unavailable."""
        try:
            await self._call.write(self._request(data=data))
        except asyncio.InvalidStateError:  # it has ended
            if await self._call.code() is not grpc.StatusCode.OK:
                raise Unavailable(f"{self._what}: {await self._call.details()!a}") from None
            raise BrokenPipeError(self._what) from None

    async def finish(self) -> None:
        """See `End`. gRPC has given on what it took."""

    def close(self) -> None:
        """See `End`."""
        self._call.cancel()


async def pass_between(own: End, other: End, *until: Coroutine[Any, Any, None], silent_s: float | None = None) -> None:
    """Passes bytes both ways until one end, or one of `until`, ends. The caller closes both.

    Args:
        silent_s: seconds without a byte after which `other` is lost; None: never.

    Raises:
        Unavailable: a call broke, or `other` was silent; or as gRPC.
    """
    await until_first_ends(_pass_on(own, other, None), _pass_on(other, own, silent_s), *until)
    await asyncio.gather(own.finish(), other.finish())


async def _pass_on(source: End, sink: End, silent_s: float | None) -> None:
    try:
        async with asyncio.timeout(silent_s) as ending:
            while data := await source.read():
                await sink.write(data)
                put_off(ending, silent_s)
    except TimeoutError:
        raise Unavailable(f"no byte came for {silent_s:.0f} s") from None
    except Unavailable:  # which is an OSError, too
        raise
    except OSError:
        return  # an end was closed


def put_off(ending: asyncio.Timeout, seconds: float | None) -> None:
    """Has a deadline pass after so many seconds from now, or up to an eighth less: a new one for each frame would cost
    as much as to pass it on. None: never."""
    due_s = ending.when()
    if seconds is not None and due_s is not None:
        now_s = asyncio.get_running_loop().time()
        if due_s - now_s < 7 / 8 * seconds:
            ending.reschedule(now_s + seconds)


async def until_first_ends(*ways: Coroutine[Any, Any, None]) -> None:
    """Runs the directions of one connection until one ends, and raises what ended it; the others are cancelled."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
