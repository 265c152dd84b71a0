"""The data plane between nodes: ExchangeService on authenticated TLS connections.

Invariant: what a peer sends is bounded before it is read, and nothing of it is opened here. What peers may call is in
`exchange_servicer.py`.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, cast

from swarm.clock import Clock
from swarm.config import ExchangeConfig
from swarm.errors import ConfigError, Forged, NotHeld, TooLarge, Unavailable
from swarm.exchange.exchange_servicer import FETCH_BYTES, ExchangeServicer
from swarm.exchange.group_stream import SUBSCRIBE_BATCH
from swarm.identity import Identity, is_hex_digest
from swarm.interfaces import DialBack, ExchangeHandler, PeerAddress, PeerClient, RecordKeeper, Reservation, StreamItem
from swarm.peers.upload_limit import UploadLimit
from swarm.relay.relay_client import RelayedSocket, RelayReservation, RelaySessions, announce_at, dial_back, records_at
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.reservation_table import RelayLimits
from swarm.types import Credit, Cursor, Digest, NodeId, Refused, SealedGroup, SealedManifest, StreamFilter, short
from swarm.wire.adverts import cursor_from_message, cursor_to_message
from swarm.wire.envelopes import (
    MAX_ENVELOPE_BYTES,
    sealed_from_bytes,
    sealed_from_message,
)
from swarm.wire.grpc_errors import calling
from swarm.wire.rollout_groups import Malformed
from swarm.wire.server import ServerLimits, Sessions, SessionServer, start_server
from swarm.wire.session import PING_S, AuthenticatedChannel, NoteClock, fetch_certificate, open_channel
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc
from swarm.wire.weights import (
    MAX_CHUNK_BYTES,
    watch_to_message,
    watched_from_message,
)

# A write that flow control blocks for this long ends the stream; the peer begins again where it is.
STALL_TIMEOUT_S: Final = 120.0
DRAIN_S: Final = 0.2
_HASH_IN_THREAD_BYTES: Final = 2**20
LEAST_PIECE_BYTES: Final = 2**16  # but for the last: a byte at a time, one body would take a million calls
MAX_BEGUN_BYTES: Final = 16 * 2**20
# Seconds of silence after which the other end is asked for a sign of life; whatever comes ends a silence. Who does not
# answer behind a relay is missed within twice that.
RELAY_PING_S: Final = 3.0
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
        self._begun = BegunBodies()
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
        self._relays = RelaySessions(self._open_relay, config.dial_timeout_s)
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
        self.endpoint = f"{host}:{bound}" if port == "0" else endpoint
        return (self.endpoint,)

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        """A mutually authenticated connection, which ends for good when it breaks.

        Raises:
            Unavailable: nobody answered in time.
            Unauthenticated: another node answered, or refused our proof.
        """
        if address.relay is not None:
            return await self._connect_through(address.relay, address, timeout_s)
        return self._peer(await self._open(address, timeout_s))

    async def _connect_through(self, relay: PeerAddress, address: PeerAddress, timeout_s: float) -> PeerClient:
        way = RelayedSocket(self._relays, relay, address.node_id)
        try:
            path = await way.__aenter__()
            channel = await self._open(address, timeout_s, socket_path=path, ping_s=RELAY_PING_S, is_prompt=True)
        except BaseException as error:
            await way.close()
            if type(error) is Unavailable and way.failure is not None:  # the others say who answered
                raise Unavailable(f"{error}: {way.failure}") from None
            raise
        return self._peer(channel, way)

    def _peer(self, channel: AuthenticatedChannel, way: RelayedSocket | None = None) -> "GrpcPeer":
        peer = GrpcPeer(channel, self._config.dial_timeout_s, self._clients, self._begun, way)
        self._clients.add(peer)
        return peer

    async def _open(self, address: PeerAddress, timeout_s: float, **options: Any) -> AuthenticatedChannel:
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
        if relay.node_id == self._identity.node_id:  # who is behind us is reached through our own server
            host, _, port = self._own_server.rpartition(":")
            local = f"127.0.0.1:{port}" if host in _WILDCARD_HOSTS or host == "::" else self._own_server
            relay = PeerAddress(node_id=relay.node_id, endpoint=local)
        return await self._open(relay, timeout_s, ping_s=ROUTER_PING_S, is_prompt=True)

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
        way = RelayedSocket(self._relays, address.relay, address.node_id)
        try:
            async with asyncio.timeout(timeout_s):
                shown = await fetch_certificate(address.endpoint, await way.__aenter__())
        except TimeoutError:
            raise Unavailable(f"{address.endpoint}: no answer within {timeout_s} s") from None
        finally:
            await way.close()
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
        if server is not None:
            await server.stop(DRAIN_S)

    async def stop(self) -> None:
        """Ends every connection and stream, ours and theirs, within DRAIN_S."""
        await self.stop_serving()
        await self.renew_connections()


class GrpcPeer:
    """One authenticated connection to a peer; implements `swarm.interfaces.PeerClient`, where its methods are told.

    Nothing that it returns was opened: signature and content are for admission to check.
    """

    def __init__(
        self,
        channel: AuthenticatedChannel,
        call_timeout_s: float,
        registry: "set[GrpcPeer]",
        begun: "BegunBodies",
        way: RelayedSocket | None = None,
    ) -> None:
        self._channel = channel
        self._way = way  # through a relay
        self._call_timeout_s = call_timeout_s
        self._registry = registry
        self._begun = begun
        self._stub: Any = pb_grpc.ExchangeServiceStub(channel.channel)

    @property
    def node_id(self) -> NodeId:
        return self._channel.node_id

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        what = f"subscription to {short(self.node_id)}"
        request = pb.SubscribeRequest(
            cursor=cursor_to_message(cursor),
            relay=wanted.relay,
            zero_variance=wanted.wants_zero_variance,
            turn_signal=wanted.wants_turn_signal,
            commitments=wanted.wants_commitments,
        )
        call = self._stub.Subscribe(request, metadata=await self._metadata())
        try:
            with calling(what):
                async for response in call:
                    yield _item_of(response, what)
        finally:
            call.cancel()
        raise Unavailable(f"{what}: the peer ended it")

    async def watch(self, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        what = f"watch of {short(policy_id)} at {short(self.node_id)}"
        call = self._stub.Watch(watch_to_message(policy_id, window), metadata=await self._metadata())
        try:
            with calling(what, NotHeld):
                async for response in call:
                    yield watched_from_message(response)
        finally:
            call.cancel()
        raise Unavailable(f"{what}: the peer ended it")

    async def fetch_chunk(self, digest: Digest, timeout_s: float) -> bytes:
        what = f"chunk {short(digest)} from {short(self.node_id)}"
        request = partial(pb.FetchChunkRequest, digest=digest)
        try:
            data = await self._fetch_body(digest, self._stub.FetchChunk, request, MAX_CHUNK_BYTES, timeout_s, what)
        except (_FalsePiece, TooLarge) as error:
            raise Forged(str(error)) from None
        found = await asyncio.to_thread(_sha256, data)
        if found != digest:
            raise Forged(f"{what}: the content hashes to {short(found)}")
        return data

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        what = f"fetch of {short(digest)} from {short(self.node_id)}"
        most, request = max_bytes + MAX_ENVELOPE_BYTES, partial(pb.FetchRequest, digest=digest)
        data = await self._fetch_body(digest, self._stub.Fetch, request, most, timeout_s, what)
        if len(data) > _HASH_IN_THREAD_BYTES:
            sealed = await asyncio.to_thread(sealed_from_bytes, data)
        else:
            sealed = sealed_from_bytes(data)
        if isinstance(sealed, Refused):
            raise Unavailable(f"{what}: {sealed.detail}")
        if sealed.digest != digest:
            raise Unavailable(f"{what}: the content hashes to {short(sealed.digest)}")
        return sealed

    async def _fetch_body(
        self, digest: Digest, method: Any, request: Callable[..., Any], max_bytes: int, timeout_s: float, what: str
    ) -> bytes:
        """A whole body, from where the last transfer of it from this peer broke off; its content was not checked."""
        data = self._begun.take(self.node_id, digest)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._fetch_rest(data, method, request, max_bytes, what):
                    continue
        except BaseException as error:  # also where nobody waits for it any more
            if not isinstance(error, _FalsePiece | TooLarge):
                self._begun.keep(self.node_id, digest, data)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{what}: {len(data)} bytes within {timeout_s} s") from None
            raise
        return bytes(data)

    async def _fetch_rest(
        self, data: bytearray, method: Any, request: Callable[..., Any], max_bytes: int, what: str
    ) -> bool:
        """Appends to `data` what one stream brings; True when whole, False when broken off after some progress."""
        before = len(data)
        total = None
        call = method(request(offset=before), metadata=await self._metadata())
        try:
            with calling(what, NotHeld):
                async for response in call:
                    total = append_piece(data, response, total, max_bytes, what)
                    if len(data) == total:
                        return True
        except Unavailable as error:
            if len(data) == before or isinstance(error, _FalsePiece):
                raise
        finally:
            call.cancel()
        if len(data) == before:
            raise _FalsePiece(f"{what}: the peer ended it at {before} bytes")
        return False

    async def _metadata(self) -> Any:
        return await self._channel.metadata(self._call_timeout_s)

    async def close(self) -> None:
        self._registry.discard(self)
        await self._channel.close()
        if self._way is not None:
            await self._way.close()


class _FalsePiece(Unavailable):
    """A body does not go on as it must: what came of it is of no use."""


class BegunBodies:
    """What came of bodies whose transfer broke off, for who asks the same peer for them again.

    By peer: who sent a false beginning spoils only what it sends itself. Beyond `max_bytes` who has most loses the
    oldest.
    """

    def __init__(self, max_bytes: int = MAX_BEGUN_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bodies: dict[tuple[NodeId, Digest], bytearray] = {}

    def take(self, peer: NodeId, digest: Digest) -> bytearray:
        """What came, which is no longer kept; empty where nothing is known."""
        return self._bodies.pop((peer, digest), bytearray())

    def keep(self, peer: NodeId, digest: Digest, data: bytearray) -> None:
        """Remembers what came."""
        if data:
            self._bodies[peer, digest] = data
        while sum(map(len, self._bodies.values())) > self._max_bytes:
            num_bytes = Counter[NodeId]()
            for (owner, _), body in self._bodies.items():
                num_bytes[owner] += len(body)
            most, _ = num_bytes.most_common(1)[0]
            del self._bodies[next(key for key in self._bodies if key[0] == most)]


def _sha256(data: bytes) -> Digest:
    return hashlib.sha256(data).digest()


def _item_of(response: pb.SubscribeResponse, what: str) -> StreamItem:
    commitments = tuple(response.commitments)
    if len(response.digest) != 32 and (response.digest or not commitments):
        raise Unavailable(f"{what}: digest of {len(response.digest)} bytes, expected 32")
    if len(commitments) > SUBSCRIBE_BATCH or any(len(commitment) != 32 for commitment in commitments):
        raise Unavailable(f"{what}: {len(commitments)} commitments, expected at most {SUBSCRIBE_BATCH} of 32 bytes")
    if response.producer and not is_hex_digest(response.producer):
        raise Unavailable(f"{what}: a producer that is no node id")
    sealed = None
    if response.digest and response.HasField("group"):
        # The claimed digest is kept: admission hashes the body once and refuses a false one by name.
        sealed = sealed_from_message(response.group, response.digest)
        if isinstance(sealed, Refused):
            raise Unavailable(f"{what}: {sealed.detail}")
    try:
        cursor = cursor_from_message(response.cursor)
    except Malformed as error:
        raise Unavailable(f"{what}: {error.detail}") from None
    return StreamItem(
        cursor=cursor,
        digest=response.digest,
        size_bytes=response.size_bytes,
        sealed=sealed,
        commitments=commitments,
        producer=response.producer,
    )


def append_piece(data: bytearray, response: Any, total: int | None, max_bytes: int, what: str) -> int:
    """Adds one piece to `data` after checking every length in it; returns the total it names."""
    size = response.total_bytes
    if size > max_bytes:
        raise TooLarge(f"{what}: {size} bytes exceed {max_bytes}")
    if total is not None and size != total:
        raise _FalsePiece(f"{what}: the total changed from {total} to {size} bytes")
    if response.offset != len(data):
        raise _FalsePiece(f"{what}: piece at {response.offset}, expected {len(data)}")
    rest = size - len(data)
    if not 0 < min(LEAST_PIECE_BYTES, rest) <= len(response.data) <= min(FETCH_BYTES, rest):
        raise _FalsePiece(f"{what}: piece of {len(response.data)} bytes at {len(data)} of {size}")
    data += response.data
    return size
