"""Bytes of a relayed connection: from a socket to a socket, and between a socket and a call to a relay.

Invariant: nothing is kept but what is under way; whoever reads slowly holds back the other end, and where one direction
ends the other does.
"""

import asyncio
import math
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import grpc

from swarm.errors import Unavailable

FRAME_BYTES: Final = 60 * 1024  # at once: a request of a server has at most 64 KiB (`ServerLimits`)
SOCKET_BYTES: Final = 512 * 1024  # that the kernel of a relay keeps of each direction, and as much again for itself
FINISH_S: Final = 10.0  # for the other side to read what was written, once nothing more comes
EOF: Final = cast(Any, grpc.aio).EOF  # what a read of a call gives at its end
_AT_ONCE: Final = struct.pack("ii", 1, 0)  # of SO_LINGER: on, 0 s

# What is written for what came: at once, or when it may be.
Frame = Callable[[bytes], bytes | Awaitable[bytes]]


async def splice(
    own: socket.socket,
    other: socket.socket,
    until: asyncio.Future[Any] | None = None,
    *,
    frame: Frame | None = None,
    frame_bytes: int = FRAME_BYTES,
    own_idle_s: float = math.inf,
    other_idle_s: float = math.inf,
) -> None:
    """Passes bytes both ways until a socket ends, or `until` is done; closes both sockets.

    Once nothing more comes from one side, the other has FINISH_S to read what came. By callbacks: streams of asyncio
    copy each byte twice more.

    Args:
        own: connected, like `other`.
        frame: what is written for what came from either; None: what came, as much as asyncio reads at once.
        frame_bytes: most that `frame` is given.
        own_idle_s: seconds in which no byte of `own` passed after which it is lost. So the other.

    Raises:
        Unavailable: no byte of a side passed for too long.
    """
    loop = asyncio.get_running_loop()
    sides = own_side, other_side = _Side(frame, frame_bytes, own_idle_s), _Side(frame, frame_bytes, other_idle_s)
    own_side.other, other_side.other = other_side, own_side
    try:
        for side, connection in zip(sides, (own, other), strict=True):
            send_at_once(connection)
            await loop.create_connection(lambda side=side: side, sock=connection)  # type: ignore[misc]
        for side in sides:
            side.resume(_START)
        await _until_first_ends(sides, until)
        for side in sides:
            side.finish()
        await asyncio.wait([side.ended for side in sides], timeout=FINISH_S)
    finally:
        for side, connection in zip(sides, (own, other), strict=True):
            side.close(connection)


async def _until_first_ends(sides: "Sequence[_Side]", until: asyncio.Future[Any] | None) -> None:
    """Raises Unavailable where no byte of a side passed for too long."""
    ends = [side.ended for side in sides] + ([] if until is None else [until])
    while not any(end.done() for end in ends):
        now_s = asyncio.get_running_loop().time()
        idle = min(sides, key=lambda side: side.left_s(now_s))
        left_s = idle.left_s(now_s)
        if left_s <= 0:
            raise Unavailable(f"no byte came for {idle.idle_s:.0f} s")
        timeout_s = None if left_s == math.inf else left_s
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def reset(connection: socket.socket) -> None:
    """Closes a socket at once. What nobody read is dropped: the kernel would keep it for minutes, beside all bounds."""
    keep_nothing(connection)
    connection.close()


def keep_nothing(connection: socket.socket) -> None:
    """Has the kernel drop what nobody read when the socket is closed."""
    with suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def send_at_once(connection: socket.socket) -> None:
    """Has the kernel send at once: Nagle's algorithm and delayed acknowledgements wait for each other."""
    if connection.family != socket.AF_UNIX:
        with suppress(OSError):  # the other side is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def local_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected to each other. Raises Unavailable where no file is free."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise Unavailable(f"no socket is free: {error.strerror}; try another relay") from None


def limit_buffers(connection: socket.socket, num_bytes: int = SOCKET_BYTES) -> None:
    """Has the kernel keep about so many bytes of each direction of a socket, and of those that it accepts."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with suppress(OSError):  # the other side is gone
            connection.setsockopt(socket.SOL_SOCKET, option, num_bytes)


# Why nothing is read of a side.
_START, _FULL, _FRAME = "not begun", "the other side has no room", "its frame may not be written yet"


class _Side(asyncio.Protocol):
    """One socket of two; what comes is written to the other one."""

    other: "_Side"

    def __init__(self, frame: Frame | None, frame_bytes: int, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._frame, self._frame_bytes, self.idle_s, self._now_s = frame, frame_bytes, idle_s, loop.time
        self._passed_s = loop.time()  # when bytes of it did
        self.ended: asyncio.Future[None] = loop.create_future()  # nothing more comes
        self._transport: Any = None
        self._paused = {_START}
        self._waiting: asyncio.Future[bytes] | None = None
        self._is_finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._frame is not None:
            self._transport.max_size = self._frame_bytes  # that asyncio reads at once
            self._transport.set_write_buffer_limits(0)  # one frame waits for the kernel, and no other is read
        self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        frame = data if self._frame is None else self._frame(data)
        if isinstance(frame, bytes):
            self._pass_on(frame)
        else:
            self.pause(_FRAME)
            self._waiting = asyncio.ensure_future(frame)
            self._waiting.add_done_callback(self._may_pass)

    def _may_pass(self, frame: asyncio.Future[bytes]) -> None:
        if not frame.cancelled():
            self._pass_on(frame.result())
            self.resume(_FRAME)

    def _pass_on(self, data: bytes) -> None:
        if not self.other._is_finished:
            self.other._transport.write(data)
        self._passed_s = self._now_s()

    def left_s(self, now_s: float) -> float:
        """Seconds until it is lost, where none of its bytes pass; not while one waits for its turn."""
        return math.inf if _FRAME in self._paused else self._passed_s + self.idle_s - now_s

    def pause(self, why: str) -> None:
        """Reads nothing until `resume` for the same reason."""
        self._paused.add(why)
        self._transport.pause_reading()

    def resume(self, why: str) -> None:
        """Reads again, where no other reason is left."""
        self._paused.discard(why)
        if not self._paused:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.other.pause(_FULL)

    def resume_writing(self) -> None:
        self.other._passed_s = self._now_s()
        self.other.resume(_FULL)

    def eof_received(self) -> bool:
        self._end()
        return True  # it may still read

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def finish(self) -> None:
        """Tells it that all was written."""
        self._is_finished = True
        with suppress(OSError):
            self._transport.write_eof()

    def close(self, connection: socket.socket) -> None:
        """Closes its socket, as `reset` does."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._transport is None:
            reset(connection)
        else:
            keep_nothing(connection)
            self._transport.abort()


async def pump(
    call: Any,
    message: Callable[..., Any],
    connection: socket.socket,
    idle_s: float = math.inf,
    finish: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Passes bytes between a call and a socket until one of them ends. The caller ends both.

    Once the socket ends, a client's call has FINISH_S to end: cancelled, it drops what was written.

    Args:
        call: of a client, or the context of one at a server; its messages have `data`.
        message: makes one that it sends.
        connection: does not block.
        idle_s: seconds without a message after which the call is lost.
        finish: of a client's call: says that nothing more is written.

    Raises:
        Unavailable: the call broke, or was idle for too long; or as gRPC.
    """
    loop, has_ended = asyncio.get_running_loop(), False  # the socket

    async def send() -> None:
        nonlocal has_ended
        while data := await loop.sock_recv(connection, FRAME_BYTES):
            try:
                await call.write(message(data=data))
            except asyncio.InvalidStateError:  # of a client's call that has ended
                if await call.code() is not grpc.StatusCode.OK:
                    raise Unavailable(f"{await call.details()!a}") from None
                break  # `receive` may not have passed on yet what came before
        else:
            has_ended = True
        if finish is not None:
            await finish()
            await asyncio.sleep(FINISH_S)

    async def receive() -> None:
        while True:
            try:
                async with asyncio.timeout(None if idle_s == math.inf else idle_s):
                    received = await call.read()
            except TimeoutError:
                raise Unavailable(f"no byte came for {idle_s:.0f} s") from None
            if received is EOF:
                return
            if not 0 < len(received.data) <= FRAME_BYTES:
                raise Unavailable(f"{len(received.data)} bytes in a frame, expected 1 to {FRAME_BYTES}")
            if not has_ended:
                await loop.sock_sendall(connection, received.data)

    try:
        await until_first_ends(send(), receive())
    except Unavailable:  # which is an OSError, too
        raise
    except OSError:
        return  # the local end was closed


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
