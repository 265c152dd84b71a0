"""A group and a chunk that are under way when the connection ends go on where they were, over a new connection."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from swarm.clock import ManualClock
from swarm.errors import Forged, Unavailable
from swarm.exchange import exchange_servicer, grpc_peer
from swarm.exchange.exchange_servicer import FETCH_BYTES
from swarm.exchange.grpc_peer import BegunBodies
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, PeerClient
from swarm.testing.builders import HoldsNothing
from swarm.types import Digest, NodeId, SealedGroup
from swarm.wire.envelopes import sealed_to_bytes
from swarm.wire.weights import MAX_CHUNK_BYTES
from tests.worlds.grpc_world import sealed_of, transport_of

RUN = "resumed"
HOLD_AT = 2 * FETCH_BYTES + FETCH_BYTES // 2  # in the middle of the third piece
OVERHEAD = 32 * 1024  # of TLS, HTTP/2 and the greeting
CHUNK = random.Random(7).randbytes(MAX_CHUNK_BYTES)
OWNER = Identity.from_seed(bytes(32))
GROUP = sealed_of(OWNER, CHUNK)


class Holder(HoldsNothing):
    def __init__(self) -> None:
        self.chunk_data = CHUNK

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        return GROUP

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        return self.chunk_data


class Line:
    """A line to a server that holds back all that comes after so many bytes, until it is cut; None: nothing."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.hold_at: int | None = None
        self.is_cut = asyncio.Event()
        self.num_bytes = list[int]()  # that came back, of each connection

    async def __aenter__(self) -> "Line":
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._endpoint.rpartition(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        number = len(self.num_bytes)
        self.num_bytes.append(0)

        async def back() -> None:
            while data := await from_server.read(8192):
                if self.hold_at is not None and self.num_bytes[number] > self.hold_at:
                    await self.is_cut.wait()
                    return
                self.num_bytes[number] += len(data)
                writer.write(data)
                await writer.drain()

        async def there() -> None:
            while data := await reader.read(8192):
                to_server.write(data)
                await to_server.drain()

        ways = [asyncio.ensure_future(back()), asyncio.ensure_future(there())]
        with suppress(OSError):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, to_server):
            end.transport.abort()


@dataclass
class Pair:
    holder: Holder
    client: GrpcTransport
    line: Line

    async def connect(self) -> PeerClient:
        return await self.client.connect(PeerAddress(node_id=OWNER.node_id, endpoint=self.line.endpoint), 5.0)

    async def break_off(self, fetch: Callable[[PeerClient], Awaitable[bytes]]) -> None:
        """A transfer whose connection ends in the middle of its third piece, when two have come."""
        come, two_came = grpc_peer.append_piece, asyncio.Event()

        def counted(data: bytearray, *arguments: Any) -> int:
            total = come(data, *arguments)
            if len(data) == 2 * FETCH_BYTES:
                two_came.set()
            return total

        self.line.hold_at = HOLD_AT
        peer = await self.connect()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc_peer, "append_piece", counted)
            transfer = asyncio.ensure_future(fetch(peer))
            await two_came.wait()
            self.line.is_cut.set()
            with pytest.raises(Unavailable):
                await transfer
        await peer.close()
        self.line.hold_at = None


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    holder = Holder()
    server, client = transport_of(OWNER), transport_of()
    (endpoint,) = await server.serve(holder)
    async with Line(endpoint) as line:
        yield Pair(holder, client, line)
        await asyncio.gather(server.stop(), client.stop())  # before the line, whose connections end with theirs


async def fetch_group(peer: PeerClient) -> bytes:
    return sealed_to_bytes(await peer.fetch(GROUP.digest, 4 * 2**20, 10.0))


async def fetch_chunk(peer: PeerClient) -> bytes:
    return await peer.fetch_chunk(hashlib.sha256(CHUNK).digest(), 10.0)


@pytest.mark.parametrize(("fetch", "whole"), [(fetch_group, sealed_to_bytes(GROUP)), (fetch_chunk, CHUNK)])
async def test_a_new_connection_brings_only_what_was_missing(
    pair: Pair, fetch: Callable[[PeerClient], Awaitable[bytes]], whole: bytes
):
    await pair.break_off(fetch)
    peer = await pair.connect()
    num_before = len(pair.line.num_bytes)
    assert await fetch(peer) == whole
    brought = sum(pair.line.num_bytes[num_before - 1 :])
    assert brought < len(whole) - 2 * FETCH_BYTES + OVERHEAD, "the two pieces that had come were not sent again"
    again = await fetch(peer)
    assert again == whole, "nothing is left of it"
    assert sum(pair.line.num_bytes[num_before - 1 :]) > brought + len(whole)


async def test_a_false_beginning_is_charged_to_who_sent_it_and_not_kept(pair: Pair):
    pair.holder.chunk_data = bytes(MAX_CHUNK_BYTES)
    await pair.break_off(fetch_chunk)
    pair.holder.chunk_data = CHUNK
    peer = await pair.connect()
    with pytest.raises(Forged):
        await fetch_chunk(peer)
    assert await fetch_chunk(peer) == CHUNK


async def test_a_body_shorter_than_what_came_of_it_is_fetched_anew(pair: Pair):
    await pair.break_off(fetch_chunk)
    pair.holder.chunk_data = CHUNK[:1000]
    peer = await pair.connect()
    with pytest.raises(Forged, match="ended it"):
        await fetch_chunk(peer)
    pair.holder.chunk_data = CHUNK
    assert await fetch_chunk(peer) == CHUNK


async def test_a_body_that_comes_byte_by_byte_is_left_at_the_first(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange_servicer, "FETCH_BYTES", 1)  # of the server alone
    come, num_pieces = grpc_peer.append_piece, 0

    def counted(*arguments: Any) -> int:
        nonlocal num_pieces
        num_pieces += 1
        return come(*arguments)

    monkeypatch.setattr(grpc_peer, "append_piece", counted)
    peer = await pair.connect()
    with pytest.raises(Forged):
        await peer.fetch_chunk(hashlib.sha256(CHUNK).digest(), 2.0)
    assert num_pieces == 1, num_pieces


def test_a_peer_that_breaks_off_on_and_on_costs_what_others_began_nothing():
    begun = BegunBodies(ManualClock(), max_bytes=100)
    begun.keep("honest", bytes(32), bytearray(40))
    for number in range(20):
        begun.keep("eve", bytes([number]) * 32, bytearray(40))
    assert len(begun.take("honest", bytes(32))) == 40


def test_many_keys_that_began_little_leave_room_for_others_later() -> None:
    clock = ManualClock()
    begun = BegunBodies(clock, max_bytes=100)
    for number in range(50):
        begun.keep(f"key {number}", bytes(32), bytearray(2))
    clock.advance(600.0)
    begun.keep("honest", bytes(32), bytearray(40))
    assert len(begun.take("honest", bytes(32))) == 40


def test_what_is_kept_is_bounded_and_by_peer():
    begun = BegunBodies(ManualClock(), max_bytes=100)
    for number in range(5):
        begun.keep("a", bytes([number]) * 32, bytearray(30))
    begun.keep("b", bytes(32), bytearray(b"x" * 10))
    begun.keep("b", bytes([9]) * 32, bytearray(101))
    assert begun.take("b", bytes([9]) * 32) == b"", "more than all may have"
    assert begun.take("b", bytes(32)) == b""
    begun.keep("a", bytes(32), bytearray(b"mine"))
    assert begun.take("b", bytes(32)) == b"" and begun.take("a", bytes(32)) == b"mine"
    assert begun.take("a", bytes(32)) == b""
