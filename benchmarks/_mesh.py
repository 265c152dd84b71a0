"""Three ways for one peer to end up with every other peer's groups, behind one small interface.

Invariant: connections are open and read before `publish` is called, and `on_group` is called once for each
group of another peer, after whatever that way promises to have checked.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from benchmarks._groups import RUN_ID
from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import NotHeld, Unavailable
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, PeerClient, StreamItem
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, Digest, NodeId, Refused, SealedGroup, StreamFilter
from swarm.wire.envelopes import open_group

MAX_GROUP_BYTES: Final = 4 * 2**20
_LENGTH: Final = struct.Struct("<I")
_DIAL_TIMEOUT_S: Final = 30.0

OnGroup = Callable[[int], None]  # bytes of the body


class Mesh(Protocol):
    """All-to-all exchange as one peer sees it."""

    async def serve(self) -> str:
        """Starts listening; returns host:port."""
        ...

    async def connect(self, peers: list[PeerAddress]) -> None:
        """Follows every peer, and waits until every peer follows us."""
        ...

    async def publish(self, groups: list[SealedGroup]) -> None:
        """Hands our groups to every follower."""
        ...

    async def stop(self) -> None:
        """Ends every connection."""
        ...


def check(sealed: SealedGroup) -> None:
    """Signature, digest and structure, as every node checks them first. Raises RuntimeError."""
    opened = open_group(sealed, MAX_GROUP_BYTES)
    if isinstance(opened, Refused):
        raise RuntimeError(f"a genuine group was refused: {opened.reason} {opened.detail}")


class GrpcMesh:
    """The transport under measurement: TLS, authenticated, each group opened as it arrives."""

    def __init__(self, identity: Identity, on_group: OnGroup) -> None:
        self._transport = GrpcTransport(identity, RUN_ID, ExchangeConfig(), SystemClock())
        self._log = _Log()
        self._on_group = on_group
        self._readers: list[asyncio.Task[None]] = []

    async def serve(self) -> str:
        (endpoint,) = await self._transport.serve(self._log)
        return endpoint

    async def connect(self, peers: list[PeerAddress]) -> None:
        """Subscribes to every peer, and waits until every peer has subscribed here."""
        for address in peers:
            peer = await self._transport.connect(address, _DIAL_TIMEOUT_S)
            self._readers.append(asyncio.create_task(self._read(peer)))
        await self._log.wait_followers(len(peers))

    async def publish(self, groups: list[SealedGroup]) -> None:
        """Appends to the log that every subscriber follows."""
        await self._log.append(groups)

    async def stop(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._transport.stop()

    async def _read(self, peer: PeerClient) -> None:
        try:
            async for item in peer.subscribe(Cursor(), StreamFilter()):
                sealed = item.sealed
                if sealed is None:
                    sealed = await peer.fetch(item.digest, MAX_GROUP_BYTES, _DIAL_TIMEOUT_S)
                check(sealed)
                self._on_group(sealed.size_bytes)
        except Unavailable:
            return  # the peer ended first; what is missing shows as a run that never completes


class _Log(HoldsNothing):
    """A node's own groups in memory, followed by any number of subscribers."""

    def __init__(self) -> None:
        self._items: list[SealedGroup] = []
        self._changed = asyncio.Condition()
        self._num_followers = 0

    async def append(self, groups: list[SealedGroup]) -> None:
        async with self._changed:
            self._items.extend(groups)
            self._changed.notify_all()

    async def wait_followers(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_followers >= count)

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        at = len(self._items)
        async with self._changed:
            self._num_followers += 1
            self._changed.notify_all()
        while True:
            async with self._changed:
                while len(self._items) <= at:
                    await self._changed.wait()
            while at < len(self._items):
                sealed = self._items[at]
                at += 1
                yield StreamItem(
                    cursor=Cursor(epoch="benchmark", sequence=at),
                    digest=sealed.digest,
                    size_bytes=sealed.size_bytes,
                    sealed=sealed,
                )

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        for sealed in self._items:
            if sealed.digest == digest:
                return sealed
        raise NotHeld(f"digest {digest.hex()[:8]}")


class PlainMesh:
    """The floor of any transport: the same bodies over bare asyncio TCP, nothing checked."""

    def __init__(self, on_group: OnGroup) -> None:
        self._on_group = on_group
        self._server: asyncio.Server | None = None
        self._followers: list[asyncio.StreamWriter] = []
        self._grown = asyncio.Condition()
        self._readers: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def connect(self, peers: list[PeerAddress]) -> None:
        """Connects to every peer, and waits until every peer has connected here."""
        for address in peers:
            host, _, port = address.endpoint.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            self._writers.append(writer)
            self._readers.append(asyncio.create_task(self._read(reader)))
        async with self._grown:
            await self._grown.wait_for(lambda: len(self._followers) >= len(peers))

    async def publish(self, groups: list[SealedGroup]) -> None:
        """Writes every body, after its length, to every follower."""
        data = b"".join(_LENGTH.pack(group.size_bytes) + group.body for group in groups)
        for writer in self._followers:
            writer.write(data)
        await asyncio.gather(*(writer.drain() for writer in self._followers))

    async def stop(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for writer in (*self._writers, *self._followers):
            writer.close()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._grown:
            self._followers.append(writer)
            self._grown.notify_all()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                await reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # the peer ended first
            self._on_group(size)


class CheckOnly:
    """No network at all: as many checks as would arrive, on our own groups. The floor of verification."""

    def __init__(self, on_group: OnGroup) -> None:
        self._on_group = on_group
        self._num_peers = 0

    async def serve(self) -> str:
        """Listens nowhere."""
        return ""

    async def connect(self, peers: list[PeerAddress]) -> None:
        """Remembers how many peers there would be."""
        self._num_peers = len(peers)

    async def publish(self, groups: list[SealedGroup]) -> None:
        """Opens our own groups once for each peer."""
        for _ in range(self._num_peers):
            for sealed in groups:
                check(sealed)
                self._on_group(sealed.size_bytes)

    async def stop(self) -> None:
        """Nothing to end."""
