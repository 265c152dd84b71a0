"""The data plane between nodes: ExchangeService on authenticated TLS connections.

Invariant: both ends of a connection proved their keys. `exchange_servicer.py` answers calls of peers, `grpc_peer.py`
calls them; `swarm.relay` adds the path through a relay.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc

from swarm.addresses import is_loopback
from swarm.clock import Clock
from swarm.config import ExchangeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.exchange.exchange_servicer import ExchangeServicer
from swarm.exchange.grpc_peer import BegunBodies, CloseWay, GrpcPeer
from swarm.identity import Identity
from swarm.interfaces import ExchangeHandler, PeerAddress, PeerClient
from swarm.peers.send_order import UploadLimit
from swarm.types import NodeId
from swarm.wire.server import ServerLimits, Sessions, SessionServer, start_server
from swarm.wire.session import PING_S, AuthenticatedChannel, NoteClock, open_channel
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc

# A write that flow control blocks for this long ends the stream; the peer begins again where it is.
STALL_TIMEOUT_S: Final = 120.0
DRAIN_S: Final = 0.2
DIAL_TIMEOUT_S: Final = 5.0  # of a connection attempt, through relays, too: several round trips of a slow network
ROUTER_PING_S: Final = 6.0  # of silence, behind a router: the strictest tried router forgets connections after 8 s
WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "[::]", ""})


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerHooks:
    """Callbacks by which a transport asks its node about a peer, and reports observations of a peer."""

    require_allowed: Callable[[NodeId], None] = lambda node_id: None  # see `Sessions`
    require_entry: Callable[[NodeId, bytes], None] = lambda node_id, credential: None  # see `Sessions`
    standing: Callable[[NodeId], int] = lambda node_id: 0  # rank of a peer; streams of lower rank make room first
    note_call: Callable[[NodeId, str], None] = lambda node_id, subnet: None  # a peer opens a stream, from that subnet
    note_clock: NoteClock = lambda node_id, now_s, at_s: None  # the clock of a peer that we dialled
    is_giver: Callable[[NodeId], bool] = lambda node_id: True  # served first if upload is short


class GrpcTransport:
    """Serves our groups to peers and connects to theirs; implements `swarm.interfaces.Transport`."""

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
    ) -> None:
        """Creates a transport that neither serves nor dials yet; `credential()` is shown to peers."""
        self._identity, self._run_id, self._config, self._clock = identity, run_id, config, clock
        self._credential, self._hooks = credential, hooks
        rate = config.most_own_bytes_per_s
        self._upload = UploadLimit(rate, clock, hooks.is_giver) if rate else None
        self._sessions = Sessions(identity, run_id, clock, limits, hooks.require_allowed, hooks.require_entry)
        self._stall_timeout_s = stall_timeout_s
        self._server: SessionServer | None = None
        self._clients: set[GrpcPeer] = set()
        self._begun = BegunBodies(clock)
        self.stays_here = False  # it dials no address beyond this machine, and no relay
        self.is_dialable = True  # by others, as far as is known; a node that is not relays nothing
        self._own_server = ""  # host:port that our own server listens on
        self.endpoint = ""  # that others dial, as served

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        """Starts answering peers; returns the endpoints to advertise.

        Raises:
            ConfigError: exchange.listen cannot be listened on, or names no host that peers could dial.
        """
        assert self._server is None, "serve() was called twice"
        servicer = ExchangeServicer(
            handler, self._sessions, self._stall_timeout_s, self._hooks.standing, self._hooks.note_call, self._upload
        )
        add = cast(Any, pb_grpc.add_ExchangeServiceServicer_to_server)
        endpoint = self._config.advertise or self._config.listen
        host, _, port = endpoint.rpartition(":")
        if host in WILDCARD_HOSTS:
            raise ConfigError(f"exchange.advertise: {endpoint!r} names no host that peers could dial; set host:port")
        self._server, bound = await start_server(
            self._config.listen, self._sessions, [lambda server: add(servicer, server), *self._more_services()]
        )
        self._own_server = f"{self._config.listen.rpartition(':')[0]}:{bound}"
        self.endpoint = f"{host}:{bound}" if port == "0" else endpoint
        return (self.endpoint,)

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        """Opens a mutually authenticated connection, which ends for good when it breaks.

        Raises:
            Unavailable: the peer did not answer in time, or this transport does not dial the address.
            Unauthenticated: another node answered, or the peer refused our proof.
        """
        if address.relay is not None:
            raise Unavailable(f"{address.endpoint} leads through a relay, which this transport does not dial")
        return self._peer(await self._open(address, timeout_s))

    def _more_services(self) -> list[Callable[[grpc.aio.Server], None]]:
        """Functions that register other services on the same server."""
        return []

    def _require_here(self, address: PeerAddress) -> None:
        host = address.endpoint.rpartition(":")[0]
        if self.stays_here and (address.relay is not None or not is_loopback(host.strip("[]"))):
            raise Unavailable(
                f"{address.endpoint} is on another machine, whose answers are not scored here without confinement; "
                "swarm doctor tells what is missing"
            )

    def _peer(self, channel: AuthenticatedChannel, close_way: CloseWay | None = None) -> GrpcPeer:
        peer = GrpcPeer(channel, DIAL_TIMEOUT_S, self._clients, self._begun, close_way)
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
            self._hooks.note_clock,
            **options,
        )

    async def renew_connections(self) -> None:
        """Closes every connection that we opened, since they broke with the old network."""
        await asyncio.gather(*(client.close() for client in list(self._clients)))

    async def stop_serving(self) -> None:
        """Stops answering peers; their calls end within DRAIN_S."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(DRAIN_S)

    async def stop(self) -> None:
        """Stops answering peers, whose calls end within DRAIN_S, and closes every connection that we opened."""
        await self.stop_serving()
        await self.renew_connections()
