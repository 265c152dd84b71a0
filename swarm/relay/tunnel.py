"""Bytes of a relayed connection: from a socket to a socket, and between a socket and a call to a relay.

Invariant: nothing is kept but what is under way; whoever reads slowly holds back the other end, and where one direction
ends the other does.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, cast

import grpc

from swarm.errors import Unavailable

FRAME_BYTES: Final = 60 * 1024  # at once: a request of a server has at most 64 KiB (`ServerLimits`)
SOCKET_BYTES: Final = 256 * 1024  # that the kernel of a relay keeps of each direction: else it grows to megabytes
FINISH_S: Final = 10.0  # for the other side to read what was written, once nothing more comes
EOF: Final = cast(Any, grpc.aio).EOF  # what a read of a call gives at its end
_AT_ONCE: Final = struct.pack("ii", 1, 0)  # of SO_LINGER: on, 0 s

# What is written for what came: at once, or when it may be.
Frame = Callable[[bytes], bytes | Awaitable[bytes]]


async def splice(
    own: socket.socket,
    other: socket.socket,
    *until: Coroutine[Any, Any, None],
    frame: Frame | None = None,
    own_silent_s: float | None = None,
    other_silent_s: float | None = None,
) -> None:
    """Passes bytes both ways until a socket, or one of `until`, ends; closes both sockets.

    Once nothing more comes from one side, the other has FINISH_S to read what came. Callbacks, as streams of asyncio
    copy each byte twice more, and would keep a relay from 70 % of what a direct connection gives.

    Args:
        own: connected, like `other`.
        frame: what is written for what came from either, of which it is given at most FRAME_BYTES; None: what came.
        own_silent_s: seconds in which no byte of `own` passed after which it is lost; None: never. So the other.

    Raises:
        Unavailable: a side was silent; or what `until` raises.
    """
    own_side, other_side = _Side(frame, own_silent_s), _Side(frame, other_silent_s)
    own_side.other, other_side.other = other_side, own_side
    sides = (own_side, other_side)
    try:
        for side, connection in zip(sides, (own, other), strict=True):
            send_at_once(connection)
            await asyncio.get_running_loop().create_connection(lambda side=side: side, sock=connection)  # type: ignore[misc]
        for side in sides:
            side.go_on(_START)
        await until_first_ends(*map(_until_ended, sides), *until)
        for side in sides:
            side.finish()
        await asyncio.wait([side.ended for side in sides], timeout=FINISH_S)
    finally:
        for side, connection in zip(sides, (own, other), strict=True):
            side.reset(connection)
        for coroutine in until:
            coroutine.close()


def reset(connection: socket.socket) -> None:
    """Closes a socket at once. What nobody read is dropped: the kernel would keep it for minutes, beside all bounds."""
    with suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    connection.close()


def send_at_once(connection: socket.socket) -> None:
    """Has the kernel wait for nothing before it sends: with Nagle's algorithm a relay gives half."""
    if connection.family != socket.AF_UNIX:
        with suppress(OSError):  # the other side is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def local_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected to each other. Raises Unavailable where no file is free."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise Unavailable(f"no socket is free: {error.strerror}; try another relay") from None


def bound(connection: socket.socket) -> None:
    """Has the kernel keep at most SOCKET_BYTES of each direction of a socket, and of those that it accepts."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with suppress(OSError):  # the other side is gone
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


# Why nothing is read of a side.
_START, _FULL, _FRAME = "not begun", "the other side has no room", "its frame may not be written yet"


class _Side(asyncio.Protocol):
    """One socket of two; what comes is written to the other one."""

    other: "_Side"

    def __init__(self, frame: Frame | None, silent_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._frame, self.silent_s, self._now_s = frame, silent_s, loop.time
        self.heard_s = loop.time()  # when bytes of it passed
        self.ended: asyncio.Future[None] = loop.create_future()  # nothing more comes
        self._socket: Any = None  # the transport
        self._held = {_START}
        self.is_finished = False
        self._waiting: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = transport
        if self._frame is not None:
            self._socket.max_size = FRAME_BYTES  # that asyncio reads at once; else four times as much
            self._socket.set_write_buffer_limits(0)  # one frame waits for the kernel, and no other is read
        self._socket.pause_reading()

    def data_received(self, data: bytes) -> None:
        frame = data if self._frame is None else self._frame(data)
        if isinstance(frame, bytes):
            self._pass_on(frame)
        else:
            self.hold(_FRAME)
            self._waiting = asyncio.ensure_future(frame)
            self._waiting.add_done_callback(self._may_pass)

    def _pass_on(self, data: bytes) -> None:
        if not self.other.is_finished:
            self.other._socket.write(data)
        self.heard_s = self._now_s()

    def _may_pass(self, frame: asyncio.Future[bytes]) -> None:
        if not frame.cancelled():
            self._pass_on(frame.result())
            self.go_on(_FRAME)

    def hold(self, why: str) -> None:
        """Reads nothing until `go_on` for the same reason."""
        self._held.add(why)
        self._socket.pause_reading()

    def go_on(self, why: str) -> None:
        self._held.discard(why)
        if not self._held:
            self._socket.resume_reading()

    def pause_writing(self) -> None:
        self.other.hold(_FULL)

    def resume_writing(self) -> None:
        self.other.heard_s = self._now_s()
        self.other.go_on(_FULL)

    def eof_received(self) -> bool:
        self._end()
        return True  # it may still read

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def is_waiting(self) -> bool:
        """Whether what came may not be written yet."""
        return _FRAME in self._held

    def finish(self) -> None:
        """Tells it that all was written."""
        self.is_finished = True
        with suppress(OSError):
            self._socket.write_eof()

    def reset(self, connection: socket.socket) -> None:
        """See `reset`."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._socket is None:
            reset(connection)
            return
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._socket.abort()


async def _until_ended(side: _Side) -> None:
    """Raises Unavailable where the side is silent for too long."""
    if side.silent_s is None:
        await asyncio.wait((side.ended,))
        return
    while not side.ended.done():
        now_s = asyncio.get_running_loop().time()
        left_s = side.silent_s if side.is_waiting else side.heard_s + side.silent_s - now_s
        if left_s <= 0:
            raise Unavailable(f"no byte came for {side.silent_s:.0f} s")
        await asyncio.wait((side.ended,), timeout=left_s)


async def pump(
    call: Any,
    message: Callable[..., Any],
    connection: socket.socket,
    silent_s: float | None = None,
    finish: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Passes bytes between a call and a socket until one of them ends. The caller ends both.

    Once the socket ends, a client's call has FINISH_S to end: cancelled, it drops what was written.

    Args:
        call: of a client, or the context of one at a server; its messages have `data`.
        message: makes one that it sends.
        connection: does not block.
        silent_s: seconds without a message after which the call is lost; None: never.
        finish: of a client's call: says that nothing more is written.

    Raises:
        Unavailable: the call broke, or was silent; or as gRPC.
    """
    loop, is_written = asyncio.get_running_loop(), False

    async def send() -> None:
        nonlocal is_written
        while data := await loop.sock_recv(connection, FRAME_BYTES):
            try:
                await call.write(message(data=data))
            except asyncio.InvalidStateError:  # of a client's call that has ended
                if await call.code() is not grpc.StatusCode.OK:
                    raise Unavailable(f"{await call.details()!a}") from None
                break  # `receive` may not have passed on yet what came before
        else:
            is_written = True
        if finish is not None:
            await finish()
            await asyncio.sleep(FINISH_S)

    async def receive() -> None:
        while True:
            async with asyncio.timeout(silent_s):
                received = await call.read()
            if received is EOF:
                return
            if not 0 < len(received.data) <= FRAME_BYTES:
                raise Unavailable(f"{len(received.data)} bytes in a frame, expected 1 to {FRAME_BYTES}")
            if not is_written:  # else the socket is closed
                await loop.sock_sendall(connection, received.data)

    try:
        await until_first_ends(send(), receive())
    except TimeoutError:
        raise Unavailable(f"no byte came for {silent_s:.0f} s") from None
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
