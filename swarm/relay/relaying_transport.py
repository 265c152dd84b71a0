"""A transport that relays for others, and reaches and is reached through relays.

Invariant: a relay proves nothing. Through it both ends prove their keys to each other, as on a direct connection.
"""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

import grpc

from swarm.clock import Clock
from swarm.config import ExchangeConfig
from swarm.errors import Unavailable
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
from swarm.relay.relay_client import RelayReservation, RelaySessions, announce_at, dial_back, records_at
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.relayed_socket import RelayedSocket
from swarm.relay.reservation_table import RelayLimits
from swarm.wire.server import ServerLimits
from swarm.wire.session import AuthenticatedChannel, fetch_certificate

RELAY_PING_S: Final = 3.0  # of silence on a relayed connection, after which the other end is asked for a sign of life
RELAY_PINGS: Final = 2  # in which no byte came: the relay is left


class RelayingTransport(GrpcTransport):
    """The transport of a node; implements `swarm.interfaces.Transport` and `swarm.interfaces.Reachability`."""

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
        """As its base; `relay_limits` bounds what it does for nodes that cannot be dialled."""
        super().__init__(identity, run_id, config, clock, limits, stall_timeout_s, hooks, credential)
        self.directory: RecordKeeper | None = None  # for nodes that reach none of its peers
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
            opened.pop_all()  # the peer ends it
        return self._peer(channel, way.close)

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
        await super().renew_connections()
        await self._relays.close()

    async def stop_serving(self) -> None:
        await self.relay.close_port()  # what was sent through relays arrives until here
        await super().stop_serving()

    def _more_services(self) -> list[Callable[[grpc.aio.Server], None]]:
        return [self.relay.register]

    async def _open_relay(self, relay: PeerAddress, timeout_s: float) -> AuthenticatedChannel:
        relay = PeerAddress(node_id=relay.node_id, endpoint=self._relay_endpoint(relay))
        return await self._open(relay, timeout_s, ping_s=ROUTER_PING_S, is_prompt=True)

    def _relay_endpoint(self, relay: PeerAddress) -> str:
        if relay.node_id != self._identity.node_id:
            return relay.endpoint
        host, _, port = self._own_server.rpartition(":")  # who is behind us is reached through our own server
        return f"127.0.0.1:{port}" if host in WILDCARD_HOSTS or host == "::" else self._own_server
