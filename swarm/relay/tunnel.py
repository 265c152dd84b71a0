"""Sockets of relayed connections: accepted, spliced with each other, or pumped through a call to a relay.

Invariant: each accepted socket is handed over in the same turn of the event loop, so none is left without an owner; the
servers of asyncio leak a socket that they accept while they are being closed. Only bytes in transit are buffered, a
slow reader slows the sender down, and the end of one direction ends the other.
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

FRAME_BYTES: Final = 60 * 1024  # below the 64 KiB that a server accepts as a request (`ServerLimits`)
SOCKET_BYTES: Final = 512 * 1024  # kernel buffer of each direction; the kernel doubles it for its own bookkeeping
FINISH_S: Final = 10.0  # for the other side to read the rest after the end of one side
EOF: Final = cast(Any, grpc.aio).EOF  # result of a read at the end of a call
_AT_ONCE: Final = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s
_IN_A_TURN: Final = 16  # with 1, a thousand connections in a second keep others out of the queue of a busy process
_AGAIN_S: Final = 1.0  # pause when no file descriptor is free; connections wait in the kernel's queue

# Returns the bytes to write for bytes that were read: at once, or once they may be forwarded.
Frame = Callable[[bytes], bytes | Awaitable[bytes]]


class Acceptor:
    """Accepts sockets from `start` to `close` and hands each to `take`; owns the listening socket."""

    def __init__(self, listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._listening, self._take = listening, take
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listening.setblocking(False)

    def start(self) -> None:
        """Starts accepting, at first or after a pause without a free file descriptor."""
        self._again = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_IN_A_TURN):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file descriptor is free
                self._loop.remove_reader(self._listening)
                self._again = self._loop.call_later(_AGAIN_S, self.start)
                return
            self._take(connection)

    def close(self) -> None:
        """Stops accepting; idempotent. The kernel rejects connections that were not accepted yet."""
        if self._again is not None:
            self._again.cancel()
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()


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
    """Forwards bytes in both directions until a socket ends or `until` is done; closes both sockets.

    After the end of one side the other has FINISH_S to read the rest. Protocols are used, since streams of asyncio
    would copy each byte twice more.

    Args:
        own, other: sockets of the two sides.
        until: ends the connection when it is done; None: only the end of a socket does.
        frame: called with up to `frame_bytes` from either side, returns the bytes to write; None: the same bytes.
        own_idle_s, other_idle_s: seconds without a byte of a side after which Unavailable is raised.
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
    """Waits until a side ends or `until` is done. Raises Unavailable if a side sent no byte for its `idle_s`."""
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
    """Closes a socket and drops unread bytes, which the kernel would keep for minutes outside all bounds."""
    keep_nothing(connection)
    connection.close()


def keep_nothing(connection: socket.socket) -> None:
    """Makes the kernel drop unread bytes when the socket is closed."""
    with suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def send_at_once(connection: socket.socket) -> None:
    """Disables Nagle's algorithm, which waits for delayed acknowledgements."""
    if connection.family != socket.AF_UNIX:
        with suppress(OSError):  # the other side is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def local_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of connected sockets. Raises Unavailable without a free file descriptor."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise Unavailable(f"no socket is free: {error.strerror}; try another relay") from None


def limit_buffers(connection: socket.socket, num_bytes: int = SOCKET_BYTES) -> None:
    """Bounds the kernel's buffers of a socket, and of the sockets that it accepts."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with suppress(OSError):  # the other side is gone
            connection.setsockopt(socket.SOL_SOCKET, option, num_bytes)


# Reasons for not reading from a side.
_START, _FULL, _FRAME = "not started", "the other side is full", "its frame may not pass yet"


class _Side(asyncio.Protocol):
    """One of two sockets; its bytes are written to the other."""

    other: "_Side"

    def __init__(self, frame: Frame | None, frame_bytes: int, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._frame, self._frame_bytes, self.idle_s, self._now_s = frame, frame_bytes, idle_s, loop.time
        self._passed_s = loop.time()  # time of its newest bytes
        self.ended: asyncio.Future[None] = loop.create_future()  # no more bytes to read
        self._transport: Any = None
        self._paused = {_START}
        self._waiting: asyncio.Future[bytes] | None = None
        self._is_finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._frame is not None:
            self._transport.max_size = self._frame_bytes  # bytes of one read
            self._transport.set_write_buffer_limits(0)  # no read while one frame waits for the kernel
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
        """Seconds until the side has been idle for `idle_s`; infinite while a frame waits for its turn."""
        return math.inf if _FRAME in self._paused else self._passed_s + self.idle_s - now_s

    def pause(self, why: str) -> None:
        """Stops reading until `resume` for the same reason."""
        self._paused.add(why)
        self._transport.pause_reading()

    def resume(self, why: str) -> None:
        """Resumes reading if no other reason to pause remains."""
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
        return True  # the socket stays open for writing

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def finish(self) -> None:
        """Ends the output to this socket."""
        self._is_finished = True
        with suppress(OSError):
            self._transport.write_eof()

    def close(self, connection: socket.socket) -> None:
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
    """Forwards bytes between a call and a socket until one of them ends. The caller closes both.

    Args:
        call: call of a client, or context of a call at a server; its messages have `data`.
        message: makes a message to send from `data`.
        connection: non-blocking socket.
        idle_s: seconds without a message after which the call is lost.
        finish: ends the writing on a client's call; None at a server.

    Raises:
        Unavailable: the call broke, or brought no message for `idle_s`.
        AioRpcError: the call ended with an error.
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
                break  # `receive` may still have bytes to forward
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
    """Runs the directions of one connection until one ends, cancels the others, and raises the error of the first."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
