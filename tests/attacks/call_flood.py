"""Attacker that calls a gRPC server with frames written by hand, for tests and `benchmarks.heartbeat_flood`.

A call costs it a tenth of what it costs a gRPC client: one attacker keeps a server busy. Invariant: frames are those of
HTTP/2 (RFC 9113, headers as RFC 7541 without a table), within the windows and the streams that a server allows:
nothing is refused for its form.
"""

import asyncio
import base64
import hashlib
import secrets
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from swarm.identity import DOMAIN_HELLO, Identity
from swarm.types import NodeId
from swarm.wire.session import CERTIFICATE_NAME, NONCE_BYTES, PROTOCOL_VERSION, SESSION_KEY, hello_message
from swarm.wire.v1 import session_service_pb2 as pb

STREAMS: Final = 32  # at once on a connection, where the server lets it have as many
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_MAX_STREAMS: Final = 3  # number of that setting
_INITIAL_WINDOW: Final = 65535
_WIDE: Final = 2**30


@dataclass(slots=True)
class Tally:
    """Counts of an attacker's calls, by their outcome."""

    num_opened: int = 0  # connections
    num_answered: int = 0  # calls with a message
    num_refused: int = 0  # calls with a status alone


@dataclass(slots=True)
class _Call:
    done: asyncio.Future[bytes]
    data: bytearray = field(default_factory=bytearray)


class RawConnection:
    """One connection, which makes calls with one message and takes one in return.

    Example:
        async with await RawConnection.open("127.0.0.1:4001", "127.0.0.2") as connection:
            await connection.hello(identity, server, "run")
            await connection.call("/swarm.wire.v1.CoordinatorService/Heartbeat", message)
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Tally) -> None:
        self._reader = reader
        self._writer = writer
        self._tally = tally
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._window = _INITIAL_WINDOW
        self._num_streams = STREAMS
        self._has_window = asyncio.Event()
        self._is_greeted = asyncio.Event()
        self._token = b""
        self._settings = (4).to_bytes(2) + _WIDE.to_bytes(4)  # window of each stream
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, self._settings))
        writer.write(_frame(_WINDOW_UPDATE, 0, 0, _WIDE.to_bytes(4)))
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(cls, endpoint: str, source: str, tally: Tally | None = None) -> Self:
        """Connects from an address of this machine. Raises OSError."""
        host, _, port = endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=client_context(), server_hostname=CERTIFICATE_NAME, local_addr=(source, 0)
        )
        tally = tally or Tally()
        tally.num_opened += 1
        return cls(reader, writer, tally)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.transport.abort()

    async def hello(self, identity: Identity, server: NodeId, run_id: str) -> None:
        """Proves an identity. Raises OSError where the server does not want it, or is gone."""
        challenge = pb.ChallengeResponse.FromString(
            await self.call(_SESSION + "Challenge", pb.ChallengeRequest(client_nonce=secrets.token_bytes(NONCE_BYTES)))
        )
        der = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        digest = hashlib.sha256(der).digest()
        signed = hello_message(challenge.server_nonce, digest, identity.node_id, server, run_id)
        request = pb.HelloRequest(
            public_key=identity.public_key,
            signature=identity.sign(DOMAIN_HELLO, signed),
            run_id=run_id,
            protocol_version=PROTOCOL_VERSION,
        )
        self._token = pb.HelloResponse.FromString(await self.call(_SESSION + "Hello", request)).session_token

    async def call(self, path: str, message: Any) -> bytes:
        """One call; its answer, empty where it was refused. Raises OSError when the connection ends."""
        body = message.SerializeToString()
        data = b"\0" + len(body).to_bytes(4) + body
        while self._window < len(data) and not self._reading.done():
            self._has_window.clear()
            await self._has_window.wait()
        if self._reading.done():
            raise ConnectionResetError
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._window -= len(data)
        call = self._calls[stream] = _Call(asyncio.get_running_loop().create_future())
        headers = _frame(_HEADERS, _END_HEADERS, stream, self._headers(path))
        self._writer.write(headers + _frame(_DATA, _END_STREAM, stream, data))
        return await call.done

    async def begin_calls(self, path: str) -> None:
        """Begins as many calls as the server allows, whose requests never come."""
        await self._is_greeted.wait()
        for _ in range(self._num_streams):
            stream, self._next_stream = self._next_stream, self._next_stream + 2
            self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, self._headers(path)))

    async def call_on(self, path: str, message: Any) -> None:
        """Calls on and on, with as many calls at once as the server allows, until the connection ends."""

        async def one_after_the_other() -> None:
            with suppress(OSError):
                while True:
                    await self.call(path, message)

        await self._is_greeted.wait()  # more streams than the server allows would be refused for that alone
        await asyncio.gather(*(one_after_the_other() for _ in range(self._num_streams)))

    def _headers(self, path: str) -> bytes:
        fields = b"\x83\x87" + b"\x04" + _text(path.encode()) + b"\x01" + _text(b"swarm-node")
        fields += b"\x0f\x10" + _text(b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
        if self._token:
            fields += b"\x00" + _text(SESSION_KEY.encode()) + _text(base64.b64encode(self._token))
        return fields

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                self._take(head[3], head[4], int.from_bytes(head[5:]), payload)
        except (OSError, EOFError):
            pass
        finally:
            self._is_greeted.set()
            self._has_window.set()
            for call in self._calls.values():
                if not call.done.done():
                    call.done.set_exception(ConnectionResetError())
                    call.done.exception()  # perhaps nobody waits for it

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for offset in range(0, len(payload), 6):
                if int.from_bytes(payload[offset : offset + 2]) == _MAX_STREAMS:
                    self._num_streams = min(STREAMS, int.from_bytes(payload[offset + 2 : offset + 6]))
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
            self._is_greeted.set()
        elif kind == _PING and not flags & _ACK:
            self._writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload)
            self._has_window.set()
        elif kind == _GOAWAY:
            raise ConnectionResetError
        elif kind == _DATA and stream in self._calls:
            self._calls[stream].data += payload
        if kind == _RESET or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            call = self._calls.pop(stream, None)
            if call is not None:
                self._tally.num_answered += bool(call.data)
                self._tally.num_refused += not call.data
                if not call.done.done():
                    call.done.set_result(bytes(call.data[5:]))


_SESSION: Final = f"/{pb.DESCRIPTOR.services_by_name['SessionService'].full_name}/"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _text(value: bytes) -> bytes:
    assert len(value) < 127, len(value)
    return bytes((len(value),)) + value


def client_context() -> ssl.SSLContext:
    """TLS as a node speaks it, without a look at the certificate of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


@asynccontextmanager
async def forwarding(source: str, endpoint: str) -> AsyncGenerator[str]:
    """An endpoint whose connections reach another one from `source`: for clients that cannot choose their address."""
    host, _, port = endpoint.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        await asyncio.gather(copy(reader, out_writer), copy(out_reader, writer))
        for end in (writer, out_writer):
            with suppress(OSError):
                await end.wait_closed()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
