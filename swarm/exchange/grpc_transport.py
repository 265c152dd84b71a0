"""The data plane between nodes: ExchangeService on authenticated TLS connections, direct or through a relay.

Invariant: both ends of a connection proved their keys. What peers may call is in `exchange_servicer.py`, what we call
in `grpc_peer.py`.
"""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final, cast

from swarm.addresses import is_loopback
from swarm.clock import Clock
from swarm.config import ExchangeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.exchange.exchange_servicer import ExchangeServicer
from swarm.exchange.grpc_peer import BegunBodies, GrpcPeer
from swarm.identity import Identity
from swarm.interfaces import DialBack, ExchangeHandler, PeerAddress, PeerClient, RecordKeeper, Reservation
from swarm.peers.upload_limit import UploadLimit
from swarm.relay.relay_client import RelayReservation, RelaySessions, announce_at, dial_back, records_at
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.relayed_socket import RelayedSocket
from swarm.relay.reservation_table import RelayLimits
from swarm.types import NodeId
from swarm.wire.server import ServerLimits, Sessions, SessionServer, start_server
from swarm.wire.session import PING_S, AuthenticatedChannel, NoteClock, fetch_certificate, open_channel
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc

# A write that flow control blocks for this long ends the stream; the peer begins again where it is.
STALL_TIMEOUT_S: Final = 120.0
DRAIN_S: Final = 0.2
# Seconds of silence after which the other end is asked for a sign of life; whatever comes ends a silence.
RELAY_PING_S: Final = 3.0
RELAY_PINGS: Final = 2  # in which no byte came: the relay is left
ROUTER_PING_S: Final = 6.0  # from behind a router: the strictest that was tried forgets after 8 s
_WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "[::]", ""})


class GrpcTransport:
    """Serves our groups to peers and connects to theirs; implements `swarm.interfaces.Transport`.

    Example:
        transport = GrpcTransport(identity, "demo", ExchangeConfig(), SystemClock())
        endpoints = await transport.serve(handler)
        peer = await transport.connect(PeerAddress(node_id=..., endpoint="host:4001"), timeout_s=5.0)
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        config: ExchangeConfig,
        clock: Clock,
        limits: ServerLimits | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        require_allowed: Callable[[NodeId], None] = lambda node_id: None,
        require_entry: Callable[[NodeId, bytes], None] = lambda node_id, credential: None,
        credential: Callable[[], bytes] = bytes,
        standing: Callable[[NodeId], int] = lambda node_id: 0,
        note_call: Callable[[NodeId, str], None] = lambda node_id, subnet: None,
        note_clock: NoteClock = lambda node_id, now_s, at_s: None,
        relay_limits: RelayLimits | None = None,
        is_giver: Callable[[NodeId], bool] = lambda node_id: True,
    ) -> None:
        """What a node knows of its peers.

        Args:
            require_allowed: see `Sessions`.
            require_entry: see `Sessions`.
            credential: what we show to peers.
            standing: a peer's, whose streams make room last where it is high.
            note_call: called with a peer that opens a stream, and the subnet that it calls from.
            note_clock: called with the clock of a peer that we dialled.
            relay_limits: of what it does for nodes that cannot be dialled.
            is_giver: whether a peer goes first where `max_upload_bytes_per_s` is short.
        """
        self._identity = identity
        self._run_id = run_id
        self._config = config
        self._clock = clock
        self._credential = credential
        self._standing, self._note_call, self._note_clock = standing, note_call, note_clock
        rate = config.most_own_bytes_per_s
        self._upload = UploadLimit(rate, clock, is_giver) if rate else None
        self._sessions = Sessions(identity, run_id, clock, limits, require_allowed, require_entry)
        self._stall_timeout_s = stall_timeout_s
        self._server: SessionServer | None = None
        self._clients: set[GrpcPeer] = set()
        self._begun = BegunBodies(clock)
        self.stays_here = False  # it dials no address beyond this machine, and no relay
        self.is_dialable = True  # by others, as far as is known; who is not relays nothing
        self.relay = RelayServicer(
            self._sessions,
            clock,
            relay_limits or RelayLimits(),
            lambda: self.is_dialable,
            standing,
            lambda: self.directory,
        )
        self.directory: RecordKeeper | None = None  # for nodes that reach none of its peers
        self._relays = RelaySessions(self._open_relay, self._relay_endpoint, config.dial_timeout_s)
        self._own_server = ""  # host:port that our own server listens on
        self.endpoint = ""  # where others dial it, as served

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        """Starts answering peers; returns the endpoints to advertise.

        Raises:
            ConfigError: exchange.listen cannot be listened on, or nobody could dial what it says.
        """
        assert self._server is None, "serve() was called twice"
        servicer = ExchangeServicer(
            handler, self._sessions, self._stall_timeout_s, self._standing, self._note_call, self._upload
        )
        add = cast(Any, pb_grpc.add_ExchangeServiceServicer_to_server)
        endpoint = self._config.advertise or self._config.listen
        host, _, port = endpoint.rpartition(":")
        if host in _WILDCARD_HOSTS:
            raise ConfigError(f"exchange.advertise: {endpoint!r} names no host that peers could dial; set host:port")
        self._server, bound = await start_server(
            self._config.listen, self._sessions, [lambda server: add(servicer, server), self.relay.register]
        )
        self._own_server = f"{self._config.listen.rpartition(':')[0]}:{bound}"
        await self.relay.open_port(self._config.listen, self._config.relay_port)
        self.endpoint = f"{host}:{bound}" if port == "0" else endpoint
        return (self.endpoint,)

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        """A mutually authenticated connection, which ends for good when it breaks.

        Raises:
            Unavailable: nobody answered in time.
            Unauthenticated: another node answered, or refused our proof.
        """
        self._require_here(address)
        if address.relay is not None:
            return await self._connect_through(address.relay, address, timeout_s)
        return self._peer(await self._open(address, timeout_s))

    def _require_here(self, address: PeerAddress) -> None:
        host = address.endpoint.rpartition(":")[0]
        if self.stays_here and (address.relay is not None or not is_loopback(host.strip("[]"))):
            raise Unavailable(
                f"{address.endpoint} is on another machine, whose answers are not scored here without confinement; "
                "swarm doctor tells what is missing"
            )

    async def _connect_through(self, relay: PeerAddress, address: PeerAddress, timeout_s: float) -> PeerClient:
        way = RelayedSocket(self._relays, relay, address.node_id, idle_s=RELAY_PINGS * RELAY_PING_S)
        async with AsyncExitStack() as opened:
            path = await opened.enter_async_context(way)
            channel = await self._open(address, timeout_s, socket_path=path, ping_s=RELAY_PING_S)
            opened.pop_all()  # the peer ends it
        return self._peer(channel, way)

    def _peer(self, channel: AuthenticatedChannel, way: RelayedSocket | None = None) -> GrpcPeer:
        peer = GrpcPeer(channel, self._config.dial_timeout_s, self._clients, self._begun, way)
        self._clients.add(peer)
        return peer

    async def _open(self, address: PeerAddress, timeout_s: float, **options: Any) -> AuthenticatedChannel:
        self._require_here(address)
        # behind a router, which forgets idle connections
        options.setdefault("ping_s", PING_S if self.is_dialable else ROUTER_PING_S)
        return await open_channel(
            address.endpoint,
            address.node_id,
            self._identity,
            self._run_id,
            timeout_s,
            self._clock,
            self._credential,
            self._note_clock,
            **options,
        )

    async def _open_relay(self, relay: PeerAddress, timeout_s: float) -> AuthenticatedChannel:
        relay = PeerAddress(node_id=relay.node_id, endpoint=self._relay_endpoint(relay))
        return await self._open(relay, timeout_s, ping_s=ROUTER_PING_S, is_prompt=True)

    def _relay_endpoint(self, relay: PeerAddress) -> str:
        if relay.node_id != self._identity.node_id:
            return relay.endpoint
        host, _, port = self._own_server.rpartition(":")  # who is behind us is reached through our own server
        return f"127.0.0.1:{port}" if host in _WILDCARD_HOSTS or host == "::" else self._own_server

    async def dial_back(self, peer: PeerAddress, timeout_s: float) -> DialBack:
        """Asks a peer to dial the address that our call comes from, at the port that we advertise."""
        advertised = (self._config.advertise or self._own_server).rpartition(":")[2]
        port = int(advertised if advertised != "0" else self._own_server.rpartition(":")[2])
        return await dial_back(self._relays, peer, port, timeout_s)

    def reservation_at(self, relay: PeerAddress) -> RelayReservation:
        """A reservation at a relay, not held yet; its connections go to our own server, which has to be started."""
        return RelayReservation(self._relays, relay, self._own_server)

    async def check_reservation(self, reservation: Reservation, timeout_s: float) -> None:
        """Looks at our own certificate through a reservation: only who has its key can show it. Raises Unavailable."""
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
        """Hands a relay our signed advert, to be put into the directory. Raises Unavailable."""
        await announce_at(self._relays, relay, advert)

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        """Signed adverts that a relay knows, which nobody checked. Raises Unavailable."""
        return await records_at(self._relays, relay)

    async def renew_connections(self) -> None:
        """Ends every connection that we opened: they broke with the network they were of."""
        await asyncio.gather(*(client.close() for client in list(self._clients)))
        await self._relays.close()

    async def stop_serving(self) -> None:
        """Ends what peers call here, within DRAIN_S; relays lead here until then, so that what was sent arrives."""
        server, self._server = self._server, None
        await self.relay.close_port()
        if server is not None:
            await server.stop(DRAIN_S)

    async def stop(self) -> None:
        """Ends every connection and stream, ours and theirs, within DRAIN_S."""
        await self.stop_serving()
        await self.renew_connections()
