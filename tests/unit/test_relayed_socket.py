"""A local socket for a relayed node: whatever is connected to it ends with it."""

import asyncio
import gc
import os
import socket
import tempfile
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from waits import until

from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress
from swarm.relay import relaying_transport
from swarm.relay.relay_client import RelaySessions
from swarm.relay.relaying_transport import RelayedSocket
from swarm.relay.tunnel import EOF, FRAME_BYTES
from swarm.testing.builders import make_identity
from swarm.wire.v1 import relay_service_pb2 as pb

RELAY, NODE = (make_identity(number).node_id for number in (1, 2))


class NeverConnects:
    """Sessions with a relay that does not answer."""

    @asynccontextmanager
    async def call(self, relay: PeerAddress) -> AsyncGenerator[tuple[Any, Any]]:
        await asyncio.Event().wait()
        yield None, None


class Call:
    """A relayed connection on which `num_frames` come, more than a socket takes that nobody reads."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames, self.num_read = num_frames, 0
        self.full, self.ended = asyncio.Event(), asyncio.Event()

    async def write(self, request: Any) -> None:
        """Nobody reads it."""

    async def done_writing(self) -> None:
        """Nobody reads it."""

    def cancel(self) -> None:
        self.ended.set()

    async def read(self) -> Any:
        number, self.num_read = self.num_read, self.num_read + 1
        if not number:
            return pb.ConnectResponse()  # it is taken
        if number > self.num_frames:
            return EOF
        if number > 3:
            self.full.set()
        return pb.ConnectResponse(data=bytes(FRAME_BYTES))


class Connects:
    """Sessions with a relay that leads on."""

    def __init__(self, num_frames: int) -> None:
        self.connection = Call(num_frames)

    @asynccontextmanager
    async def call(self, relay: PeerAddress) -> AsyncGenerator[tuple[Any, Any]]:
        yield SimpleNamespace(Connect=lambda metadata: self.connection), ()

    async def socket_to(self, relay: PeerAddress, port: int, ticket: bytes) -> None:
        """It has no port for sockets."""


def socket_of(sessions: object) -> RelayedSocket:
    return RelayedSocket(cast(RelaySessions, sessions), PeerAddress(node_id=RELAY, endpoint="127.0.0.1:1"), NODE, 60.0)


def connected(path: str) -> socket.socket:
    """A local end that reads nothing by itself."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def unclosed_after(scene: Coroutine[Any, Any, socket.socket]) -> tuple[list[str], bytes]:
    """Warnings of unclosed sockets after the loop of a scene, and the bytes that its local end could still read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        connection = asyncio.run(scene)
        gc.collect()
    with connection:
        connection.settimeout(10.0)
        read = bytearray()
        with suppress(ConnectionResetError):  # it was turned away before it was accepted
            while data := connection.recv(1 << 20):
                read += data
    return [str(warning.message) for warning in caught if "unclosed" in str(warning.message)], bytes(read)


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_of_any_age_is_closed_with_its_socket(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    monkeypatch.setattr(asyncio, "to_thread", at_once)  # else the loop turns as often as the machine has time for

    async def scene() -> socket.socket:
        async with socket_of(NeverConnects()) as path:
            connection = connected(path)
            for _ in range(turns):
                await asyncio.sleep(0)
        assert not Path(path).parent.exists()
        return connection

    assert unclosed_after(scene()) == ([], b"")


def test_a_connection_that_nobody_reads_is_closed_with_its_socket() -> None:
    async def scene() -> socket.socket:
        sessions = Connects(100)
        async with socket_of(sessions) as path:
            connection = connected(path)
            await sessions.connection.full.wait()
        return connection

    unclosed, read = unclosed_after(scene())
    assert not unclosed and 0 < len(read) < 100 * FRAME_BYTES


async def test_what_came_before_a_relayed_connection_ended_reaches_the_local_end() -> None:
    sessions = Connects(3)  # as much as the kernel takes
    async with socket_of(sessions) as path:
        with connected(path) as connection:
            connection.settimeout(10.0)
            await sessions.connection.ended.wait()
            read = await asyncio.to_thread(lambda: b"".join(iter(lambda: connection.recv(1 << 20), b"")))
    assert len(read) == 3 * FRAME_BYTES


async def test_what_came_before_the_call_ended_reaches_a_local_end_that_writes_on() -> None:
    sessions = Connects(4)
    call: Any = sessions.connection
    is_refused = asyncio.Event()

    async def write(request: Any) -> None:
        if request.data:
            is_refused.set()
            raise asyncio.InvalidStateError  # as gRPC where the call has ended

    async def code() -> grpc.StatusCode:
        return grpc.StatusCode.OK

    call.write, call.code = write, code
    async with socket_of(sessions) as path:
        with connected(path) as connection:
            connection.settimeout(10.0)
            await call.full.wait()
            connection.send(b"on")
            await is_refused.wait()
            await asyncio.sleep(0.05)
            read = await asyncio.to_thread(lambda: b"".join(iter(lambda: connection.recv(1 << 20), b"")))
    assert len(read) == 4 * FRAME_BYTES


async def test_a_relay_that_takes_no_first_message_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("swarm.relay.relaying_transport.TAKEN_WITHIN_S", 0.05)
    sessions = Connects(1)
    sessions.connection.write = never
    relayed = socket_of(sessions)
    async with relayed as path:
        with connected(path) as connection:
            connection.settimeout(10.0)
            assert await asyncio.to_thread(connection.recv, 1) == b""
    assert "not taken within" in str(relayed.failure)


async def test_a_dial_that_is_given_up_leaves_no_folder_and_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 120 dials through a relay, given up within .3 s, 11 left both."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    num_listening = 0
    for turns in range(12):
        left = socket_of(NeverConnects())
        dialling = asyncio.ensure_future(left.__aenter__())
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        if turns >= 4:
            async with asyncio.timeout(10):
                while not left._folder:  # noqa: ASYNC110 - a thread makes it
                    await asyncio.sleep(0)
            for _ in range(turns % 4):
                await asyncio.sleep(0)
        was_entered = dialling.done()
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
        if was_entered:
            await left.close()
        num_listening += left._accepted is not None and left._accepted._listening.fileno() >= 0
    await asyncio.sleep(0.1)  # a thread that nobody waits for
    assert num_listening == 0 and await asyncio.to_thread(os.listdir, tmp_path) == []


def test_a_dial_that_is_cancelled_while_it_waits_for_the_relays_reason_closes_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaying_transport, "WHY_S", 60.0)

    async def scene() -> socket.socket:
        way = socket_of(NeverConnects())
        path = await way.__aenter__()
        connection = connected(path)
        await until(lambda: bool(way._pumps))
        leaving = asyncio.ensure_future(way.__aexit__(Unavailable, Unavailable("nobody answers"), None))
        await asyncio.sleep(0.01)
        assert not leaving.done()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert not Path(path).parent.exists()
        return connection

    assert unclosed_after(scene()) == ([], b"")
