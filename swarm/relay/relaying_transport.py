"""Transport of a node that relays for others, dials others through relays, and is dialled through relays.

Invariant: a relay proves nothing. Both ends of a relayed connection prove their keys to each other, as on a direct one.
A connection through a relay is a connection to a local socket, and ends with it.
"""

import asyncio
import hashlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import grpc

from swarm.clock import Clock
from swarm.config import ExchangeConfig
from swarm.errors import NotHeld, Unauthenticated, Unavailable
from swarm.exchange.grpc_transport import (
    DIAL_TIMEOUT_S,
    ROUTER_PING_S,
    STALL_TIMEOUT_S,
    WILDCARD_HOSTS,
    GrpcTransport,
    PeerHooks,
)
from swarm.identity import Identity
from swarm.interfaces import DialBack, ExchangeHandler, PeerAddress, PeerClient, RecordKeeper, Reservation
from swarm.printable import printable
from swarm.relay.relay_client import RelayReservation, RelaySessions
from swarm.relay.relay_servicer import MAX_RECORDS, RelayServicer
from swarm.relay.reservation_table import RelayLimits
from swarm.relay.tunnel import EOF, FINISH_S, Acceptor, pump, splice
from swarm.types import NodeId, short
from swarm.wire.adverts import MAX_ADVERT_BYTES, is_endpoint
from swarm.wire.grpc_errors import calling
from swarm.wire.server import ServerLimits
from swarm.wire.session import AuthenticatedChannel, fetch_certificate
from swarm.wire.v1 import relay_service_pb2 as pb

logger = logging.getLogger(__name__)

RELAY_PING_S: Final = 3.0  # of silence on a relayed connection, after which the other end is pinged
RELAY_PINGS: Final = 2  # intervals without a byte after which the connection through the relay is given up
MAX_LOOKED_UP: Final = 4096  # adverts of one look-up
WHY_S: Final = 0.5  # for the relay's reason to arrive after the last byte of a connection
TAKEN_WITHIN_S: Final = 10.0  # twice as long as a relay waits


class RelayingTransport(GrpcTransport):
    """Implements `swarm.interfaces.Transport` and `swarm.interfaces.Reachability`."""

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        config: ExchangeConfig,
        clock: Clock,
        limits: ServerLimits | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        hooks: PeerHooks = PeerHooks(),
        credential: Callable[[], bytes] = bytes,
        relay_limits: RelayLimits | None = None,
    ) -> None:
        """Creates a transport. `relay_limits` bounds relaying for others; see GrpcTransport for the other arguments."""
        super().__init__(identity, run_id, config, clock, limits, stall_timeout_s, hooks, credential)
        self.directory: RecordKeeper | None = None  # serves nodes that reach none of its peers
        self.relay = RelayServicer(
            self._sessions,
            clock,
            relay_limits or RelayLimits(),
            lambda: self.is_dialable,
            hooks.standing,
            lambda: self.directory,
        )
        self._relays = RelaySessions(self._open_relay, self._relay_endpoint, DIAL_TIMEOUT_S)

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        endpoints = await super().serve(handler)
        await self.relay.open_port(self._config.listen, self._config.relay_port)
        return endpoints

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        if address.relay is None:
            return await super().connect(address, timeout_s)
        self._require_here(address)
        way = RelayedSocket(self._relays, address.relay, address.node_id, idle_s=RELAY_PINGS * RELAY_PING_S)
        async with AsyncExitStack() as opened:
            path = await opened.enter_async_context(way)
            channel = await self._open(address, timeout_s, socket_path=path, ping_s=RELAY_PING_S)
            opened.pop_all()  # the peer closes it
        return self._peer(channel, way.close)

    async def dial_back(self, peer: PeerAddress, timeout_s: float) -> DialBack:
        """Asks a peer to dial our advertised port at the address that our call comes from. Raises Unavailable."""
        advertised = (self._config.advertise or self._own_server).rpartition(":")[2]
        port = int(advertised if advertised != "0" else self._own_server.rpartition(":")[2])
        what = f"dial-back from {short(peer.node_id)}"
        async with self._relays.call(peer) as (stub, metadata):
            with calling(what, Unauthenticated):
                answer = await stub.DialBack(pb.DialBackRequest(port=port), metadata=metadata, timeout=timeout_s)
        host = str(answer.host)
        if not is_endpoint(f"{host}:{port}"):
            raise Unavailable(f"{what}: {host[:60]!a} is no address")
        detail = " ".join(printable(str(answer.detail)[:200]).split())  # `swarm status` and `swarm doctor` show it
        return DialBack(host=host, is_reached=answer.is_reached, detail=detail)

    def reservation_at(self, relay: PeerAddress) -> RelayReservation:
        """A reservation at a relay, not held yet. Its connections go to our own server, which must be running."""
        return RelayReservation(self._relays, relay, self._own_server)

    async def check_reservation(self, reservation: Reservation, timeout_s: float) -> None:
        """Fetches our own certificate, which only we can show, through a reservation. Raises Unavailable."""
        address = PeerAddress(node_id=self._identity.node_id, endpoint=reservation.endpoint)
        assert address.relay is not None
        async with RelayedSocket(self._relays, address.relay, address.node_id, idle_s=timeout_s) as path:
            try:
                async with asyncio.timeout(timeout_s):
                    shown = await fetch_certificate(address.endpoint, path)
            except TimeoutError:
                raise Unavailable(f"{address.endpoint}: no answer within {timeout_s} s") from None
        if hashlib.sha256(shown).digest() != self._sessions.certificate.digest:
            raise Unavailable(f"{address.endpoint}: somebody else answers")

    async def announce_at(self, relay: PeerAddress, advert: bytes) -> None:
        """Asks a relay to put our signed advert into the directory. Raises Unavailable."""
        timeout_s = 2 * DIAL_TIMEOUT_S
        async with self._relays.call(relay) as (stub, metadata):
            with calling(f"announcement at {short(relay.node_id)}", Unauthenticated):
                await stub.Announce(pb.AnnounceRequest(advert=advert), metadata=metadata, timeout=timeout_s)

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        """Signed adverts that a relay knows, not verified, MAX_LOOKED_UP at most. Raises Unavailable."""
        found: list[bytes] = []
        what = f"look-up at {short(relay.node_id)}"
        async with self._relays.call(relay) as (stub, metadata):
            call = stub.Lookup(pb.LookupRequest(), metadata=metadata, timeout=2 * DIAL_TIMEOUT_S)
            try:
                with calling(what, Unauthenticated):
                    async for response in call:
                        _check_adverts(response.adverts, what)
                        found += response.adverts
                        if len(found) >= MAX_LOOKED_UP:
                            break
            finally:
                call.cancel()
        return found[:MAX_LOOKED_UP]

    async def renew_connections(self) -> None:
        await super().renew_connections()
        await self._relays.close()

    async def stop_serving(self) -> None:
        await self.relay.close_port()  # after it relayed bytes no longer arrive
        await super().stop_serving()

    def _more_services(self) -> list[Callable[[grpc.aio.Server], None]]:
        return [self.relay.register]

    async def _open_relay(self, relay: PeerAddress, timeout_s: float) -> AuthenticatedChannel:
        relay = PeerAddress(node_id=relay.node_id, endpoint=self._relay_endpoint(relay))
        return await self._open(relay, timeout_s, ping_s=ROUTER_PING_S, is_prompt=True)

    def _relay_endpoint(self, relay: PeerAddress) -> str:
        if relay.node_id != self._identity.node_id:
            return relay.endpoint
        host, _, port = self._own_server.rpartition(":")  # nodes behind us are reached through our own server
        return f"127.0.0.1:{port}" if host in WILDCARD_HOSTS or host == "::" else self._own_server


def _check_adverts(adverts: Sequence[bytes], what: str) -> None:
    """Raises Unavailable for an empty or oversized message, with which a relay could make a look-up endless."""
    longest = max(map(len, adverts), default=0)
    if not 0 < len(adverts) <= MAX_RECORDS or longest > MAX_ADVERT_BYTES:
        bound = f"expected 1 to {MAX_RECORDS} of at most {MAX_ADVERT_BYTES}"
        raise Unavailable(f"{what}: {len(adverts)} adverts of up to {longest} bytes, {bound}; the relay is broken")


class RelayedSocket:
    """Context of a local socket, which yields its path; a relay forwards each connection to it to one node.

    Args:
        sessions: sessions with relays.
        relay: relay to go through.
        node_id: node at the far end.
        idle_s: seconds without a byte after which a connection is given up; each end sends a byte sooner.

    Example:
        async with RelayedSocket(sessions, relay, node_id, idle_s=6.0) as path:
            channel = await open_channel(endpoint, node_id, identity, run_id, 5.0, socket_path=path, ping_s=3.0)
    """

    def __init__(self, sessions: RelaySessions, relay: PeerAddress, node_id: NodeId, idle_s: float) -> None:
        self._sessions, self._relay, self._node_id, self._idle_s = sessions, relay, node_id, idle_s
        self._folder = ""
        self._accepted: Acceptor | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.failure: Unavailable | None = None  # reason that the relay gave for no connection

    async def __aenter__(self) -> str:
        making = asyncio.ensure_future(asyncio.to_thread(tempfile.mkdtemp, prefix="swarm-relay-"))  # mode 0700
        try:
            self._folder = await asyncio.shield(making)
            path = str(Path(self._folder) / "s")
            listening = socket.socket(socket.AF_UNIX)
            self._accepted = Acceptor(listening, self._connected)
            listening.bind(path)
            listening.listen()
            self._accepted.start()
        except OSError as error:
            await self.close()
            raise Unavailable(f"no local socket in {tempfile.gettempdir()}: {error}; set TMPDIR") from None
        except asyncio.CancelledError:
            with suppress(OSError):
                self._folder = await making
            await self.close()
            raise
        return path

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Adds the relay's reason to an Unavailable that leaves the block."""
        try:
            if type(error) is Unavailable and self._pumps:
                await asyncio.wait(self._pumps, timeout=WHY_S)
        finally:
            await self.close()
        if type(error) is Unavailable and self.failure is not None:  # subclasses already name who answered
            raise Unavailable(f"{error}: {self.failure}") from None

    def _connected(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        task = asyncio.ensure_future(self._pass_on(connection))
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        task.add_done_callback(lambda _: connection.close())  # also when it is cancelled before its first step

    async def _pass_on(self, local: socket.socket) -> None:
        what = f"connection to {short(self._node_id)} through {short(self._relay.node_id)}"
        try:
            async with self._sessions.call(self._relay) as (stub, metadata):
                call = stub.Connect(metadata=metadata)
                try:
                    with calling(what, NotHeld, Unauthenticated):
                        taken = await _until_taken(call, pb.ConnectRequest(node_id=self._node_id), what)
                        await self._through(taken, call, local)
                finally:
                    call.cancel()
        except (Unavailable, NotHeld) as error:
            self.failure = error if isinstance(error, Unavailable) else Unavailable(str(error))
            logger.debug("relayed connection ended", extra={"error": str(error)})

    async def _through(self, taken: pb.ConnectResponse, call: Any, local: socket.socket) -> None:
        remote = await self._sessions.socket_to(self._relay, taken.port, taken.ticket)
        if remote is None:
            await pump(call, pb.ConnectRequest, local, self._idle_s, call.done_writing)
            return
        over = asyncio.ensure_future(call.read())  # carries no bytes
        try:
            await splice(local, remote, over, other_idle_s=self._idle_s)
            await asyncio.wait((over,), timeout=FINISH_S)  # the relay may give the reason for the end
            if over.done():
                over.result()
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    async def close(self) -> None:
        """Closes the socket and every connection through it."""
        try:
            if self._folder:  # first, so that nobody connects any more
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        finally:
            if self._accepted is not None:
                self._accepted.close()
            for task in list(self._pumps):
                task.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)


async def _until_taken(call: Any, request: pb.ConnectRequest, what: str) -> pb.ConnectResponse:
    """Sends the request and waits until the other end takes the connection.

    No byte is sent before that, since gRPC loses the reason of a refusal that crosses our bytes. The first write may
    never return if the call ends early, hence the timeout. Raises Unavailable, or an error of gRPC.
    """
    try:
        async with asyncio.timeout(TAKEN_WITHIN_S):
            await call.write(request)
            taken = await call.read()
    except TimeoutError:
        raise Unavailable(f"{what}: not taken within {TAKEN_WITHIN_S:.0f} s") from None
    if taken is EOF or taken.data:
        raise Unavailable(f"{what}: the relay does not confirm that it was taken")
    return taken
