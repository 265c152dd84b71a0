"""In-memory transport over a faulty network, for virtual swarms and contract tests.

Invariant: every wait is on the event loop; a broken connection raises Unavailable at its reader, as broken TCP does.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar, cast

from swarm.errors import Forged, NotHeld, OtherNode, SwarmError, TooLarge, Unavailable
from swarm.exchange.grpc_transport import ROUTER_PING_S
from swarm.interfaces import DialBack, ExchangeHandler, PeerAddress, Reservation, StreamItem
from swarm.simulate.virtual.direct_network import HANDSHAKE_BYTES, Line, UnderWay
from swarm.simulate.virtual.network import MemoryNetwork, MemoryReservation, RelayedLine
from swarm.simulate.virtual.relay import CHECK_BYTES, RESERVE_BYTES, MemoryRelay
from swarm.types import Credit, Cursor, Digest, NodeId, SealedGroup, SealedManifest, StreamFilter
from swarm.weights.payload import CHUNK_BYTES, chunk_digest
from swarm.wire.session import PING_S

_HEADER_BYTES = 128  # of a message without a body, for the bandwidth cap

Item = TypeVar("Item")
Watched = SealedManifest | Credit


class MemoryTransport:
    """`swarm.interfaces.Transport` of one node over a MemoryNetwork."""

    def __init__(
        self,
        network: MemoryNetwork,
        node_id: NodeId,
        make_relay: Callable[[Callable[[], bool]], MemoryRelay] | None = None,
    ) -> None:
        """Creates the transport; `make_relay` (None: no relay) makes its relay, given a function for `is_dialable`."""
        self._network = network
        self._node_id = node_id
        self.is_dialable = True
        self.relay = None if make_relay is None else make_relay(lambda: self.is_dialable)
        network.add(node_id)

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        """Starts answering with `handler`; returns the node's single endpoint."""
        if self.relay is not None:
            self._network.relays[self._node_id] = self.relay
        return (self._network.serve(self._node_id, handler),)

    async def connect(self, address: PeerAddress, timeout_s: float) -> "MemoryClient":
        """A connection to a live node. Raises Unavailable; OtherNode if another node is at the endpoint."""
        if address.relay is not None:
            return await self._connect_through(address.relay, address.node_id, timeout_s)
        network = self._network
        if network.is_cut(self._node_id, address.node_id) or not network.is_dialable(address.node_id):
            await asyncio.sleep(timeout_s)  # a partition, or a router, swallows packets; nobody refuses
            raise Unavailable(f"no answer from {address.endpoint} in {timeout_s} s")
        await asyncio.sleep(2 * network.faults.latency_s)
        found = network.handler_at(address.endpoint)
        if found is None:
            raise Unavailable(f"{address.endpoint} refused the connection")
        if found[0] != address.node_id:
            raise OtherNode(f"{address.endpoint} is {found[0][:8]}, not {address.node_id[:8]}", found[0])
        is_behind_router = not network.is_dialable(self._node_id)
        line = Line(network, self._node_id, address.node_id, ROUTER_PING_S if is_behind_router else PING_S)
        network.count("connect", HANDSHAKE_BYTES)
        network.note("connect", self._node_id, address.node_id)
        return MemoryClient(line, network)

    async def _connect_through(
        self,
        relay: PeerAddress,
        node_id: NodeId,
        timeout_s: float,
        num_bytes: int = 2 * HANDSHAKE_BYTES + RESERVE_BYTES,
    ) -> "MemoryClient":
        network = self._network
        found = await network.reach_relay(self._node_id, relay, timeout_s)
        found.require_open()
        found.check_way(self._node_id, node_id)
        line = RelayedLine(network, self._node_id, node_id, found)
        try:
            network.handler_of(node_id)
            network.count("connect_through" if node_id != self._node_id else "check", num_bytes)
            async with asyncio.timeout(timeout_s):
                for sender, size_bytes in ((self._node_id, HANDSHAKE_BYTES), (node_id, _HEADER_BYTES)):
                    await line.pass_on(size_bytes)
                    await line.wait(line.transit_s(sender, size_bytes))
        except TimeoutError:
            line.cut("no answer")
            raise Unavailable(f"no answer from {node_id[:8]} through {relay.endpoint} in {timeout_s} s") from None
        except BaseException:
            line.cut("it did not begin")
            raise
        network.note("connect_through", self._node_id, node_id)
        return MemoryClient(line, network)

    # --- `swarm.interfaces.Reachability` ------------------------------

    async def dial_back(self, peer: PeerAddress, timeout_s: float) -> DialBack:
        """Asks a peer to dial this node; returns the peer's report. Raises Unavailable if there is none."""
        relay = await self._network.reach_relay(self._node_id, peer, timeout_s)
        self._network.count("dial_back", HANDSHAKE_BYTES + 2 * _HEADER_BYTES)
        return relay.dial_back(self._node_id)

    def reservation_at(self, relay: PeerAddress) -> MemoryReservation:
        """A reservation at a relay, not held yet: `hold` asks for it."""
        return MemoryReservation(self._network, self._node_id, relay)

    async def check_reservation(self, reservation: Reservation, timeout_s: float) -> None:
        """Connects to this node through its reservation. Raises Unavailable if the connection fails."""
        relay = PeerAddress(node_id=self._node_id, endpoint=reservation.endpoint).relay
        assert relay is not None, reservation.endpoint
        client = await self._connect_through(relay, self._node_id, timeout_s, CHECK_BYTES)
        await client.close()

    async def announce_at(self, relay: PeerAddress, advert: bytes) -> None:
        """Raises Unavailable: virtual relays have no directory, since every node reaches the directory itself."""
        raise Unavailable("this relay has no directory")

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        """Raises Unavailable: virtual relays have no directory, since every node reaches the directory itself."""
        raise Unavailable("this relay has no directory")

    async def renew_connections(self) -> None:
        """Cuts every connection that this node opened."""
        for line in self._network.lines_of(self._node_id):
            line.cut("connections begin anew")

    async def stop(self) -> None:
        self._network.crash(self._node_id)


class MemoryClient:
    """`swarm.interfaces.PeerClient` over one `Line`."""

    def __init__(self, line: Line, network: MemoryNetwork) -> None:
        self._line = line
        self._network = network

    async def _transit_s(self, sender: NodeId, body_bytes: int = 0) -> float:
        """Waits until a relay has room; returns the seconds that a message with a body of `body_bytes` takes."""
        line, size_bytes = self._line, _HEADER_BYTES + body_bytes
        if isinstance(line, RelayedLine):
            await line.pass_on(size_bytes)
        # through a relay all of it passes twice
        self._network.count("message", _HEADER_BYTES * (len(line.ends) - 1))
        return line.transit_s(sender, size_bytes)

    @property
    def node_id(self) -> NodeId:
        return self._line.server

    def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """The peer's groups after `cursor`. Raises Unavailable when the connection breaks or the stream ends."""
        line, network = self._line, self._network
        network.check_stream(line.client, line.server, cursor, True)
        return self._stream(lambda handler: handler.subscribe(line.client, cursor, wanted), self._send_groups)

    def watch(self, policy_id: str, window: int) -> AsyncIterator[Watched]:
        """Manifests that the peer holds, then new ones, and credit. Raises NotHeld and the errors of `subscribe`."""
        return self._stream(lambda handler: handler.watch(self._line.client, policy_id, window), self._send_weights)

    async def _stream(
        self,
        open_source: Callable[[ExchangeHandler], AsyncIterator[Item]],
        send_all: Callable[[AsyncIterator[Item], UnderWay[Item]], Awaitable[None]],
    ) -> AsyncGenerator[Item, None]:
        line, network = self._line, self._network
        line.check()
        under_way = UnderWay[Item]()
        source = open_source(network.handler_of(line.server))
        pump = asyncio.create_task(
            self._pump(source, send_all, under_way), name=f"stream {line.server[:8]}->{line.client[:8]}"
        )
        try:
            with line.waking(lambda: under_way.break_off(Unavailable("the line broke"))):
                while True:
                    arrived = await under_way.read()
                    line.check()
                    if isinstance(arrived, NotHeld):
                        raise arrived
                    if isinstance(arrived, Exception):
                        raise Unavailable(f"stream from {line.server[:8]} ended: {arrived!r}") from arrived
                    line.note_arrival()
                    network.note("delivered", line.server, line.client)
                    if isinstance(arrived, StreamItem):
                        network.check_stream(line.client, line.server, arrived.cursor, False)
                    yield arrived
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            under_way.stop()

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        async with self._request("group", timeout_s) as handler:
            sealed = await handler.fetch(self._line.client, digest)
            if self._network.inspect is not None:
                self._network.inspect(self._line.server, sealed)
            if sealed.size_bytes > max_bytes:
                raise TooLarge(f"group of {sealed.size_bytes} bytes, at most {max_bytes}")
            await self._transfer(sealed.size_bytes, "fetched")
            return self._corrupt(sealed)

    async def fetch_chunk(self, digest: Digest, timeout_s: float) -> bytes:
        async with self._request("chunk", timeout_s) as handler:
            chunk = await handler.chunk(self._line.client, digest)
            if not 0 < len(chunk) <= CHUNK_BYTES:
                raise Forged(f"chunk of {len(chunk)} bytes, expected 1 to {CHUNK_BYTES}")
            await self._transfer(len(chunk), "chunk")
            if chunk_digest(self._maybe_corrupt(chunk)) != digest:
                raise Forged(f"chunk from {self._line.server[:8]} is not {digest.hex()[:8]}")
            return chunk

    async def close(self) -> None:
        """Cuts the connection; its open streams and requests raise Unavailable."""
        self._line.cut("closed by this side")

    @asynccontextmanager
    async def _request(self, what: str, timeout_s: float) -> AsyncGenerator[ExchangeHandler]:
        """Gives the peer's handler once a request has reached the peer; errors become those of a remote call."""
        line, network = self._line, self._network
        line.check()
        try:
            async with asyncio.timeout(timeout_s):
                await line.wait(await self._transit_s(line.client))
                yield network.handler_of(line.server)
        except TimeoutError:
            raise Unavailable(f"no {what} from {line.server[:8]} in {timeout_s} s") from None
        except (NotHeld, TooLarge, Unavailable):
            raise
        except SwarmError as error:
            raise Unavailable(f"{line.server[:8]} failed: {error!r}") from error

    async def _transfer(self, size_bytes: int, what: str) -> None:
        """Waits while an answer travels; it may be late, or the connection may break, by the fault plan."""
        line, network = self._line, self._network
        late_s = self._lateness_s()
        await line.wait(await self._transit_s(line.server, size_bytes) + late_s)
        line.note_arrival()
        self._maybe_drop()
        network.note(what, line.server, line.client)

    async def _pump(
        self,
        source: AsyncIterator[Item],
        send_all: Callable[[AsyncIterator[Item], UnderWay[Item]], Awaitable[None]],
        under_way: UnderWay[Item],
    ) -> None:
        """Sends every item of the peer's handler, then ends the stream with an error that gives the reason."""
        try:
            await send_all(source, under_way)
            under_way.end(EOFError("the peer ended the stream"))
        except SwarmError as error:
            under_way.end(error)
        except Exception as error:
            # A programming error of the serving node: a virtual run must not swallow it.
            asyncio.get_running_loop().call_exception_handler({"message": "handler failed", "exception": error})
            under_way.end(error)
        finally:
            if isinstance(source, AsyncGenerator):
                await cast(AsyncGenerator[Item, None], source).aclose()

    async def _send_groups(self, source: AsyncIterator[StreamItem], under_way: UnderWay[StreamItem]) -> None:
        line, network, loop = self._line, self._network, asyncio.get_running_loop()
        ordered_s = 0.0  # a stream keeps its order: nothing arrives before what was sent before it
        async for item in source:
            self._maybe_drop()
            changed, body_bytes, late_s = item, 0, 0.0
            if item.sealed is None:
                late_s = self._lateness_s()  # own groups keep the order of their log; notices may take longer
            else:
                if network.inspect is not None:
                    network.inspect(line.server, item.sealed)
                body_bytes = item.sealed.size_bytes
                sealed = self._corrupt(item.sealed)
                changed = item if sealed is item.sealed else replace(item, sealed=sealed)
            ordered_s = max(ordered_s, await self._transit_s(line.server, body_bytes) + loop.time())
            await under_way.room()
            if late_s > 0:
                under_way.send_late(changed, ordered_s + late_s)
                continue
            under_way.send(changed, ordered_s)
            if network.happens(network.faults.duplicate_rate):
                network.note("duplicate", line.server, line.client)
                await under_way.room()
                under_way.send(changed, ordered_s)

    async def _send_weights(self, source: AsyncIterator[Watched], under_way: UnderWay[Watched]) -> None:
        line, loop = self._line, asyncio.get_running_loop()
        ordered_s = 0.0
        async for item in source:
            self._maybe_drop()
            changed, body_bytes = item, 0
            if isinstance(item, SealedManifest):
                body_bytes = len(item.body)
                body = self._maybe_corrupt(item.body)
                changed = item if body is item.body else replace(item, body=body)
            for _ in range(self._num_copies()):
                ordered_s = max(ordered_s, await self._transit_s(line.server, body_bytes) + loop.time())
                await under_way.room()
                under_way.send(changed, ordered_s)

    def _maybe_drop(self) -> None:
        if self._network.happens(self._network.faults.drop_rate):
            self._network.note("drop", self._line.server, self._line.client)
            self._line.cut("dropped")
            raise Unavailable(f"connection to {self._line.server[:8]} broke: dropped")

    def _corrupt(self, sealed: SealedGroup) -> SealedGroup:
        """The group, or sometimes a copy with one bit flipped and the digest of the changed body."""
        body = self._maybe_corrupt(sealed.body)
        return sealed if body is sealed.body else replace(sealed, body=body, digest=hashlib.sha256(body).digest())

    def _maybe_corrupt(self, data: bytes) -> bytes:
        if not self._network.happens(self._network.faults.corrupt_rate):
            return data
        self._network.note("corrupt", self._line.server, self._line.client)
        return self._network.corrupt(data)

    def _num_copies(self) -> int:
        if not self._network.happens(self._network.faults.duplicate_rate):
            return 1
        self._network.note("duplicate", self._line.server, self._line.client)
        return 2

    def _lateness_s(self) -> float:
        if not self._network.happens(self._network.faults.reorder_rate):
            return 0.0
        self._network.note("reorder", self._line.server, self._line.client)
        return self._network.lateness_s()
