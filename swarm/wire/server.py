"""Server side of sessions: authenticates callers, and starts a gRPC server with bounds.

Invariant: every table is bounded in size and age, per subnet and in total, so unproven clients cost a bounded amount of
memory and work. In a full table the party with most entries makes room for other parties.
"""

import asyncio
import heapq
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import grpc

from swarm.clock import Clock
from swarm.errors import ConfigError, SwarmError, Unauthenticated, Unavailable
from swarm.fairness import FairTable
from swarm.flow import BoundedTable, RateLimiter
from swarm.identity import DOMAIN_CHALLENGE, DOMAIN_HELLO, Identity, node_id_of, verify
from swarm.open_files import allow_descriptors
from swarm.types import NodeId
from swarm.wire.connection_limits import ConnectionBounds, ConnectionLimiter, peer_subnet
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.request_deadline import RequestDeadline
from swarm.wire.session import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    READ_AHEAD_BYTES,
    SESSION_KEY,
    Certificate,
    challenge_message,
    check_protocol_version,
    create_certificate,
    hello_message,
)
from swarm.wire.v1 import session_service_pb2 as pb
from swarm.wire.v1 import session_service_pb2_grpc as pb_grpc

MAX_SUBNETS: Final = 4096
_SEEN_AFTER_S: Final = 2.0  # age at which the limiter has listed a connection, unless it has ended
_TIDY_EVERY_S: Final = 1.0
REFUSALS_PER_S: Final = 1.0  # of one connection; an honest node waits longer after each
REFUSALS_BURST: Final = 32.0
# Refusals of one subnet that are answered at once, and rate of further answers; later ones wait, which costs nothing.
_PROMPT_REFUSALS: Final = 4
_ANSWERED_PER_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0
_PAUSED_SHARE: Final = 1 / 8  # of the server's calls may be waiting refusals
STREAMS_PER_CONNECTION: Final = 16
_WITHOUT_SESSION: Final = 4  # refusals that a call without a session counts for: honest nodes say Hello first

Refusal = TypeVar("Refusal", bound=SwarmError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Bounds on the cost of callers, authenticated or not."""

    # Largest request, refused before it is parsed: a relayed frame; all other requests between nodes are below 1 KB.
    # All concurrent calls together can pin 3 GB, those of connections without a key 1 GB for at most 10 s.
    request_bytes: int = 64 * 1024
    # A node has up to six streams and eight chunks on a connection; further calls wait at the client. Beyond
    # `concurrent_calls` gRPC refuses everybody, so it must exceed what all open connections can make: with 32 and
    # 1,024, 32 connections without a key filled a node.
    streams_per_connection: int = STREAMS_PER_CONNECTION
    concurrent_calls: int = STREAMS_PER_CONNECTION * ConnectionBounds().total
    # Between two looks of the limiter there may be more connections than its bounds; gRPC refuses beyond this.
    connections: int = 6144
    bounds: ConnectionBounds = field(default_factory=ConnectionBounds)
    handshake_timeout_s: float = 10.0  # TCP connect to end of the TLS handshake
    idle_timeout_s: float = 120.0  # a connection without a call is closed
    session_s: float = 900.0
    nonce_s: float = 20.0
    sessions_total: int = 4096
    sessions_per_subnet: int = 512
    handshakes_per_minute: int = 600  # calls of SessionService, per subnet


@dataclass(frozen=True, slots=True)
class _Session:
    node_id: NodeId
    peer: str
    opened_s: float
    expires_s: float


class Sessions(pb_grpc.SessionServiceServicer):
    """Proves our identity to clients, checks theirs, and stores the proven node id of each connection."""

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        clock: Clock,
        limits: ServerLimits | None = None,
        require_allowed: Callable[[NodeId], None] = lambda node_id: None,
        require_entry: Callable[[NodeId, bytes], None] = lambda node_id, credential: None,
        turn_of: Callable[[str], AbstractAsyncContextManager[None]] = lambda peer: nullcontext(),
    ) -> None:
        """Creates the service with a new certificate.

        Args:
            identity: our identity, which signs each challenge.
            run_id: the run that clients must name.
            clock: clock of the sessions.
            limits: bounds of the sessions and the server; None: the defaults.
            require_allowed: called with the node id at Hello and at every call; raises Unavailable to refuse the node.
            require_entry: called with node id and credential at Hello; raises Unavailable or Unauthenticated to refuse.
            turn_of: context of each call of SessionService by an unproven peer; raises Unavailable to refuse.
        """
        self._turn_of = turn_of
        self._require_allowed = require_allowed
        self._require_entry = require_entry
        self.certificate: Certificate = create_certificate()
        self.limits = limits or ServerLimits()
        self.identity = identity
        self.run_id = run_id
        self._clock = clock
        self._nonces: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # peer -> nonce, expiry
        self.connections = ConnectionLimiter(self.limits.bounds)
        self._sessions: dict[bytes, _Session] = {}
        self._tokens: dict[str, bytes] = {}  # by peer with a session
        self._peers = FairTable[str, str]()  # by subnet
        self._tidy_at_s = 0.0
        per_minute = self.limits.handshakes_per_minute
        self._refusals = RateLimiter[str](REFUSALS_PER_S, REFUSALS_BURST, self.limits.connections)  # by peer
        self._answered_s = BoundedTable[str, float](MAX_SUBNETS)  # last refusal of each subnet
        self._paused: list[float] = []  # answer times of waiting refusals, a heap
        self._handshakes = RateLimiter[str](per_minute / 60.0, per_minute, MAX_SUBNETS)

    def require(self, context: Context) -> NodeId:
        """Id of the node that proved its identity on the connection of this call.

        Raises:
            Unauthenticated: the call has no token, an unknown or expired one, or one of another connection.
            Unavailable: the node is not allowed now.
        """
        metadata = cast(Sequence[tuple[str, Any]], context.invocation_metadata() or ())
        token = next((value for key, value in metadata if key == SESSION_KEY), b"")
        session = self._sessions.get(token)
        if session is None or session.expires_s <= self._clock.monotonic_s():
            error = Unauthenticated("no session: call Hello on this connection first")
            raise self.refused(context.peer(), error, _WITHOUT_SESSION)
        if session.peer != context.peer():
            error = Unauthenticated("the session belongs to another connection")
            raise self.refused(context.peer(), error, _WITHOUT_SESSION)
        self._require_allowed(session.node_id)
        return session.node_id

    def refused(self, peer: str, error: Refusal, num: int = 1) -> Refusal:
        """The error of a refused call, with the pause before its answer.

        A subnet gets _ANSWERED_PER_S answers a second after a burst, since refusals are work, too. The connection is
        cut if the peer exceeds REFUSALS_PER_S, if the pause exceeds LONGEST_PAUSE_S, or if too many refusals wait.

        Args:
            peer: the refused peer, in gRPC's form.
            error: the error, whose `pause_s` is set.
            num: number of refusals that the call counts for.
        """
        now_s = self._clock.monotonic_s()
        is_within = self._refusals.spend(peer, now_s, num)
        subnet = peer_subnet(peer)
        earliest_s = now_s - _PROMPT_REFUSALS / _ANSWERED_PER_S
        answered_s = max(self._answered_s.get(subnet, earliest_s), earliest_s) + 1 / _ANSWERED_PER_S
        pause_s = max(0.0, answered_s - now_s)
        while self._paused and self._paused[0] <= now_s:
            heapq.heappop(self._paused)
        has_place = not pause_s or len(self._paused) < _PAUSED_SHARE * self.limits.concurrent_calls
        if not is_within or pause_s > LONGEST_PAUSE_S or not has_place:
            self.connections.cut(peer)
            return error
        self._answered_s[subnet] = answered_s
        if pause_s:
            heapq.heappush(self._paused, answered_s)
            error.pause_s = pause_s
        return error

    @rpc
    async def Challenge(self, request: pb.ChallengeRequest, context: Context) -> pb.ChallengeResponse:
        """Signs the client's nonce and our certificate, and returns a nonce for Hello.

        Raises:
            Unauthenticated: the client's nonce has another length than NONCE_BYTES.
            Unavailable: the peer is refused a turn, or its subnet exceeds `handshakes_per_minute`.
        """
        self._count_handshake(context.peer())
        async with self._in_turn(context.peer()):
            if len(request.client_nonce) != NONCE_BYTES:
                raise Unauthenticated(f"nonce of {len(request.client_nonce)} bytes, expected {NONCE_BYTES}")
            return pb.ChallengeResponse(
                public_key=self.identity.public_key,
                server_nonce=self._new_nonce(context.peer()),
                signature=self.identity.sign(
                    DOMAIN_CHALLENGE, challenge_message(request.client_nonce, self.certificate.digest)
                ),
                protocol_version=PROTOCOL_VERSION,
            )

    @rpc
    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloResponse:
        """Checks the client's proof over the nonce of this connection, and opens its session.

        Raises:
            Unauthenticated: the proof, the run or the protocol version is wrong, or the node may not take part.
            Unavailable: as for Challenge, or the node is not allowed now.
        """
        self._count_handshake(context.peer())
        async with self._in_turn(context.peer()):
            node_id = self._prove(request, context.peer())
            token = self._open_session(node_id, context.peer())
            return pb.HelloResponse(
                session_token=token, expires_in_s=int(self.limits.session_s), now_s=self._clock.now_s()
            )

    @asynccontextmanager
    async def _in_turn(self, peer: str) -> AsyncGenerator[None]:
        async with AsyncExitStack() as turn:
            try:
                await turn.enter_async_context(self._turn_of(peer))
            except Unavailable as error:
                raise self.refused(peer, error) from None
            yield

    def _new_nonce(self, peer: str) -> bytes:
        now_s = self._clock.monotonic_s()
        while self._nonces and (
            next(iter(self._nonces.values()))[1] <= now_s or len(self._nonces) >= self.limits.sessions_total
        ):
            self._nonces.popitem(last=False)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces.pop(peer, None)
        self._nonces[peer] = (nonce, now_s + self.limits.nonce_s)
        return nonce

    def _prove(self, request: pb.HelloRequest, peer: str) -> NodeId:
        nonce, expires_s = self._nonces.pop(peer, (b"", 0.0))  # single use, right or wrong
        if not nonce or expires_s <= self._clock.monotonic_s():
            raise Unauthenticated("no fresh challenge on this connection")
        check_protocol_version("the client", request.protocol_version)
        if request.run_id != self.run_id:
            raise Unauthenticated(f"this is run {self.run_id}, the client's is {request.run_id[:40]!a}")
        client = node_id_of(request.public_key)
        signed = hello_message(nonce, self.certificate.digest, client, self.identity.node_id, self.run_id)
        if not verify(request.public_key, DOMAIN_HELLO, signed, request.signature):
            raise Unauthenticated("the signature does not fit key, challenge and certificate")
        self._require_allowed(client)
        self._require_entry(client, request.credential)
        return client

    def _open_session(self, node_id: NodeId, peer: str) -> bytes:
        now_s = self._clock.monotonic_s()
        subnet = peer_subnet(peer)
        self._end_session(peer)
        num_own = len(self._peers.of(subnet))
        if num_own >= self.limits.sessions_per_subnet or len(self._sessions) >= self.limits.sessions_total:
            self._make_room(subnet, now_s)
        token = self._tokens[peer] = secrets.token_bytes(32)
        self._sessions[token] = _Session(node_id, peer, now_s, now_s + self.limits.session_s)
        self._peers.add(subnet, peer)
        self.connections.prove(peer, node_id)
        return token

    def _make_room(self, subnet: str, now_s: float) -> None:
        """Ends expired and broken sessions; if no place is free then, the oldest of this or of the largest subnet.

        Raises:
            Unavailable: all places are taken, and no other subnet has at least two more of them than this one.
        """
        if now_s >= self._tidy_at_s:
            self._tidy_at_s = now_s + _TIDY_EVERY_S
            for session in list(self._sessions.values()):
                is_gone = now_s - session.opened_s > _SEEN_AFTER_S and not self.connections.is_open(session.peer)
                if is_gone or session.expires_s <= now_s:
                    self._end_session(session.peer)
        if len(self._peers.of(subnet)) >= self.limits.sessions_per_subnet:
            self._end_session(self._peers.oldest(subnet))
        elif len(self._sessions) >= self.limits.sessions_total:
            most = self._peers.longest(beside=subnet)
            if most is None:
                raise Unavailable(f"{len(self._sessions)} sessions are open; try again later")
            self._end_session(self._peers.oldest(most))

    def _end_session(self, peer: str) -> None:
        if self._peers.remove(peer_subnet(peer), peer):
            del self._sessions[self._tokens.pop(peer)]

    def _count_handshake(self, peer: str) -> None:
        subnet = peer_subnet(peer)
        if not self._handshakes.spend(subnet, self._clock.monotonic_s()):
            most = self.limits.handshakes_per_minute
            error = Unavailable(f"more than {most} handshake calls in a minute from {subnet}; slow down")
            raise self.refused(peer, error)


class SessionServer:
    """A running gRPC server with its connection limiter."""

    def __init__(self, server: grpc.aio.Server, connections: ConnectionLimiter) -> None:
        self._server = server
        self._connections = connections

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, cancels running ones after `grace_s` seconds, and stops the limiter."""
        await self._server.stop(grace_s)
        await asyncio.to_thread(self._connections.stop)


async def start_server(
    listen: str, sessions: Sessions, register: Sequence[Callable[[grpc.aio.Server], None]]
) -> tuple[SessionServer, int]:
    """Starts a TLS server with SessionService and further services; returns the server and its port.

    Args:
        listen: host:port; port 0 picks a free one.
        sessions: authenticates clients; its limits bound the server.
        register: each adds one service, e.g. `lambda s: add_ExchangeServiceServicer_to_server(servicer, s)`.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    limits = sessions.limits
    num_connections = allow_descriptors(limits.connections)
    server = grpc.aio.server(
        interceptors=[RequestDeadline(sessions.refused)],
        options=_server_options(limits, num_connections),
        maximum_concurrent_rpcs=limits.concurrent_calls,
    )
    add_sessions: Any = pb_grpc.add_SessionServiceServicer_to_server
    add_sessions(sessions, server)
    for add in register:
        add(server)
    certificate = sessions.certificate
    credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.pem)])
    try:
        port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(
            f"listen {listen!r}: cannot listen there; free the port or choose another, "
            "of an address of this machine (0.0.0.0: all of them)"
        )
    await server.start()
    sessions.connections.start(listen.rpartition(":")[0], port, num_connections / limits.connections)
    return SessionServer(server, sessions.connections), port


def _server_options(limits: ServerLimits, num_connections: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.request_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A request stream is read ahead only so far, even on a fast line: this bounds what relaying holds in memory.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.max_allowed_incoming_connections", num_connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * limits.handshake_timeout_s)),
        ("grpc.max_connection_idle_ms", int(1000 * limits.idle_timeout_s)),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 2_000),  # ends of a relayed connection ping each other
        ("grpc.http2.max_ping_strikes", 4),
        ("grpc.keepalive_permit_without_calls", 1),  # otherwise such pings would be strikes
    ]
