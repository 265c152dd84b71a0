"""What a relay does for nodes that cannot be dialled: it holds their reservations, and passes on bytes.

Invariant: both ends proved their keys to this node, and what passes is a connection that they prove to each other; the
relay looks at none of it and needs no trust. Reservations, connections and bytes are bounded by node, subnet and in
all, at most one frame of each direction waits here, and who has most reservations or connections makes room for who has
fewer.
"""

import asyncio
import hashlib
import heapq
import ipaddress
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import grpc

from swarm.clock import Clock
from swarm.errors import NotHeld, TooLarge, Unavailable
from swarm.fairness import FairTable
from swarm.flow import BoundedTable, RateLimiter
from swarm.identity import is_hex_digest, node_id_of
from swarm.interfaces import RecordKeeper
from swarm.relay.tunnel import FRAME_BYTES, until_first_ends
from swarm.types import JsonDict, NodeId, short
from swarm.wire.adverts import author_of
from swarm.wire.connection_limits import peer_key, peer_subnet
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.server import Sessions
from swarm.wire.session import open_channel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1 import relay_service_pb2_grpc as pb_grpc

FIRST_MESSAGE_S: Final = 5.0
ACCEPT_S: Final = 5.0  # for a node to take a connection that somebody asked for
DIAL_BACK_S: Final = 3.0
DIAL_BACKS_PER_S: Final = 1 / 20  # of one subnet
DIAL_BACKS_BURST: Final = 8.0
# A caller that shares its address with others could have their services tried: none of these is a node's.
LEAST_PORT: Final = 1024
HTTPS_PORT: Final = 443
DIALLED_S: Final = 1500.0  # that a dial-back counts: nodes ask every 600 s, and an address may be another's later
MAX_SUBNETS: Final = 4096
TICKET_BYTES: Final = 16
ORIGIN_BYTES: Final = 8
MAX_DIALLED: Final = 4096
MAX_RECORDS: Final = 256  # in one message
RECORD_CALLS_PER_S: Final = 0.5  # look-ups and announcements of one node
RECORD_CALLS_BURST: Final = 8.0
RECORD_CALLS_OF_SUBNET: Final = 16  # times that
WAITING_PER_RESERVATION: Final = 32  # connections that a node was told of and has not taken
_ENDINGS: Final = (OSError, TimeoutError, grpc.aio.AioRpcError, grpc.aio.BaseError)
_EOF: Final = cast(Any, grpc.aio).EOF  # what a read gives at the end of a stream


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayLimits:
    """What relaying may cost this node."""

    reservations: int = 128  # nodes that hold one
    reservations_per_subnet: int = 32
    connections: int = 512
    connections_per_node: int = 28  # of the 42 calls of a node that holds a reservation; the others are its own
    connections_per_caller: int = 32
    connections_per_subnet: int = 128  # of callers
    # Of one subnet, for reservations and connections: each costs the node that is asked for, too. A session takes two.
    asks_per_s: float = 16.0
    asks_burst: float = 256.0
    bytes_per_s: int = 8 * 2**20  # of all connections together, both directions
    burst_bytes: int = 4 * 2**20
    idle_s: float = 90.0  # a connection without a byte ends; both ends send something every few seconds


class ByteBudget:
    """Bytes that pass in a second, in equal shares of those who wait: start-time fair queueing.

    A caller with many connections has the share of one; the callers of a subnet together have at most that of
    CALLERS_PER_SUBNET.

    Example:
        budget = ByteBudget(clock, bytes_per_s=2**20, burst_bytes=2**18)
        await budget.take(len(data), caller, subnet)

    Source: Goyal, Vin and Cheng, Start-time Fair Queuing, SIGCOMM 1996.
    """

    LEAST_BYTES: Final = 2048  # that a frame counts: handling one costs as much as copying some KiB
    CALLERS_PER_SUBNET: Final = 8
    # So far a party may fall behind and catch up: its next frame comes only after the last one was written.
    CATCH_UP_BYTES: Final = 2**18

    def __init__(self, clock: Clock, bytes_per_s: float, burst_bytes: float) -> None:
        self._clock, self._bytes_per_s, self._burst_s = clock, bytes_per_s, burst_bytes / bytes_per_s
        self._due_s = clock.monotonic_s() - self._burst_s  # when all that was taken has passed at this rate
        self._now = 0.0  # start tag, in bytes of one party, of what passed last
        self._tags = BoundedTable[str, float](2 * MAX_SUBNETS)  # of a party's next frame
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []  # heap: tag, number, bytes
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    async def take(self, num_bytes: int, caller: str, subnet: str) -> None:
        """Waits until there is room for so many bytes, and it is this caller's turn."""
        size = max(num_bytes, self.LEAST_BYTES)
        tag = self._tag(size, caller, subnet)
        self.num_bytes += num_bytes
        if not self._waiting and self._due_s <= self._clock.monotonic_s():
            self._pass(tag, size)
            return
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (tag, next(self._numbers), size, room))
        if self._timer is None:
            self._wait()
        await room

    def _tag(self, size: int, caller: str, subnet: str) -> float:
        earliest = self._now - self.CATCH_UP_BYTES
        of_subnet = self._tags.get(subnet, earliest)
        tag = max(earliest, self._tags.get(caller, earliest), of_subnet)
        self._tags[caller] = tag + size
        self._tags[subnet] = max(earliest, of_subnet) + size / self.CALLERS_PER_SUBNET
        return tag

    def _pass(self, tag: float, size: int) -> None:
        now_s = self._clock.monotonic_s()
        self._now = max(self._now, tag)
        self._due_s = max(self._due_s, now_s - self._burst_s) + size / self._bytes_per_s

    def _wait(self) -> None:
        delay_s = max(0.0, self._due_s - self._clock.monotonic_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._grant)

    def _grant(self) -> None:
        self._timer = None
        while self._waiting and self._due_s <= self._clock.monotonic_s():
            tag, _, size, room = heapq.heappop(self._waiting)
            if not room.done():  # else its connection ended
                self._pass(tag, size)
                room.set_result(None)
        if self._waiting:
            self._wait()


@dataclass(eq=False, slots=True)
class _Reservation:
    node_id: NodeId
    ending: asyncio.Timeout
    tickets: asyncio.Queue[pb.ReserveResponse] = field(default_factory=lambda: asyncio.Queue(WAITING_PER_RESERVATION))
    num_tickets: int = 0  # that it was given and has not shown yet


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection as the bounds see it."""

    caller: NodeId
    subnet: str
    node_id: NodeId  # asked for
    ending: asyncio.Timeout


@dataclass(eq=False, slots=True)
class _Asked:
    """A connection that was asked for and not taken yet."""

    node_id: NodeId
    taken: asyncio.Future["_FarEnd"]


@dataclass(eq=False, slots=True)
class _FarEnd:
    """The call with which a node took a connection."""

    context: Context
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # the connection, so that the call ends
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)  # the call ended


class RelayServicer(pb_grpc.RelayServiceServicer):
    """Answers RelayService.

    Args:
        sessions: authenticates callers.
        clock: for rates.
        limits: of what it may cost.
        is_open: whether this node relays now: one that cannot be dialled itself does not.
        standing: of a node; reservations and connections of those of lower standing make room first.
        directory: where adverts of others are put and looked up; None: nowhere.
    """

    def __init__(
        self,
        sessions: Sessions,
        clock: Clock,
        limits: RelayLimits,
        is_open: Callable[[], bool] = lambda: True,
        standing: Callable[[NodeId], int] = lambda node_id: 0,
        directory: Callable[[], RecordKeeper | None] = lambda: None,
    ) -> None:
        self._sessions, self._clock, self.limits = sessions, clock, limits
        self._is_open, self._standing, self._directory = is_open, standing, directory
        self._salt = secrets.token_bytes(16)  # so that nobody can choose a subnet with the origin of another
        self._dialled = BoundedTable[NodeId, tuple[str, float]](MAX_DIALLED)  # host:port where a node proved its key
        self._reservations: dict[NodeId, _Reservation] = {}
        self._reservations_of = FairTable[str, _Reservation]()  # by subnet
        self._subnet_of: dict[_Reservation, str] = {}
        self._asked: dict[bytes, _Asked] = {}
        self._connections = FairTable[str, _Connection]()  # by subnet of the caller
        self._connections_to: dict[NodeId, FairTable[str, _Connection]] = {}
        self._num_of_caller = Counter[NodeId]()
        self._budget = ByteBudget(clock, limits.bytes_per_s, limits.burst_bytes)
        self._dial_backs = RateLimiter[str](DIAL_BACKS_PER_S, DIAL_BACKS_BURST, MAX_SUBNETS)
        self._asks = RateLimiter[str](limits.asks_per_s, limits.asks_burst, MAX_SUBNETS)
        self._records = RateLimiter[NodeId](RECORD_CALLS_PER_S, RECORD_CALLS_BURST, MAX_DIALLED)
        self._records_of = RateLimiter[str](
            RECORD_CALLS_OF_SUBNET * RECORD_CALLS_PER_S, RECORD_CALLS_OF_SUBNET * RECORD_CALLS_BURST, MAX_SUBNETS
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to a server."""
        add: Any = pb_grpc.add_RelayServiceServicer_to_server
        add(self, server)

    @property
    def free_reservations(self) -> int:
        """Reservations that nobody holds; 0 where this node does not relay."""
        return max(0, self.limits.reservations - len(self._reservations)) if self._is_open() else 0

    def status(self) -> JsonDict:
        """What relaying costs now, and has cost."""
        return {
            "reservations": len(self._reservations),
            "connections": len(self._connections),
            "bytes": self._budget.num_bytes,
        }

    # --- whether the caller can be dialled ---------------------------------------------------------

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        """Connects to the caller's own address; it must prove the key of this call there."""
        node_id, host = self._sessions.require(context), peer_key(context.peer())[0]
        self._require_open()
        if request.port != HTTPS_PORT and not LEAST_PORT <= request.port < 65536:
            raise TooLarge(f"port {request.port}, expected {HTTPS_PORT}, or {LEAST_PORT} to 65535")
        if is_loopback(host):  # also who comes through a tunnel: whatever listens there, others do not reach it so
            raise Unavailable("the call comes from this machine: ask a node elsewhere")
        if not self._dial_backs.spend(peer_subnet(context.peer()), self._clock.monotonic_s()):
            error = Unavailable(f"more than {60 * DIAL_BACKS_PER_S:.0f} dial-backs in a minute; ask another node")
            raise self._sessions.refused(context.peer(), error)
        host = f"[{host}]" if ":" in host else host
        detail = ""
        try:
            channel = await open_channel(
                f"{host}:{request.port}", node_id, self._sessions.identity, self._sessions.run_id, DIAL_BACK_S,
                self._clock, credential=None,
            )  # fmt: skip
            await channel.close()
            self._dialled[node_id] = f"{host}:{request.port}", self._clock.monotonic_s()
        except Unavailable as error:
            self._dialled.pop(node_id, None)
            detail = str(error)[:200]
        return pb.DialBackResponse(host=host, is_reached=not detail, detail=detail)

    def _require_open(self) -> None:
        if not self._is_open():
            raise Unavailable("this node does not relay")

    # --- reservations ------------------------------------------------------------------------------------

    @rpc
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> None:
        """Holds the caller's reservation and tells it of connections; a newer one of the same node ends it."""
        node_id = self._sessions.require(context)
        self._require_open()
        subnet = self._count_ask(context)
        if node_id in self._reservations:
            self._end(self._reservations[node_id])
        elif len(self._reservations_of.of(subnet)) >= self.limits.reservations_per_subnet:
            self._make_room(node_id, subnet, list(self._reservations_of.of(subnet)))
        elif len(self._reservations) >= self.limits.reservations:
            self._make_room(node_id, subnet, list(self._reservations.values()))
        try:
            async with asyncio.timeout(None) as ending:
                reservation = self._reservations[node_id] = _Reservation(node_id, ending)
                self._reservations_of.add(subnet, reservation)
                self._subnet_of[reservation] = subnet
                try:
                    await context.write(pb.ReserveResponse())
                    while True:
                        await context.write(await reservation.tickets.get())
                finally:
                    self._forget(reservation)
        except TimeoutError:
            raise Unavailable("the reservation is another's now") from None

    def _make_room(self, node_id: NodeId, subnet: str, reservations: list[_Reservation]) -> None:
        """Ends the newest of these reservations of lower standing; else one of the subnet with most of all."""
        standing = self._standing(node_id)
        lower = [reservation for reservation in reservations if self._standing(reservation.node_id) < standing]
        if lower:
            self._end(lower[-1])
            return
        most = self._reservations_of.longest(beside=subnet)
        if most is None or len(reservations) < len(self._reservations):
            raise Unavailable(
                f"{len(reservations)} reservations are taken, of your network or of all; try another relay"
            )
        self._end(self._reservations_of.newest(most))

    def _count_ask(self, context: Context) -> str:
        """The subnet of who asks for a reservation or a connection. Raises Unavailable where it asks too often."""
        subnet = peer_subnet(context.peer())
        if not self._asks.spend(subnet, self._clock.monotonic_s()):
            error = Unavailable(f"more than {self.limits.asks_per_s:.0f} relayed connections in a second; slow down")
            raise self._sessions.refused(context.peer(), error)
        return subnet

    def _end(self, reservation: _Reservation) -> None:
        reservation.ending.reschedule(asyncio.get_running_loop().time())
        self._forget(reservation)

    def _forget(self, reservation: _Reservation) -> None:
        subnet = self._subnet_of.pop(reservation, None)
        if subnet is not None:
            self._reservations_of.remove(subnet, reservation)
            if self._reservations.get(reservation.node_id) is reservation:
                del self._reservations[reservation.node_id]

    # --- connections -------------------------------------------------------------------------------

    @rpc
    async def Connect(self, request_iterator: Any, context: Context) -> None:
        """One end of a connection: tells the node that is asked for, and passes on bytes once it took it."""
        caller = self._sessions.require(context)
        self._require_open()
        first = await self._first(context)
        if not is_hex_digest(first.node_id) or first.data:
            raise TooLarge("the first message names a node, and nothing else")
        reservation, dialled = self._reservations.get(first.node_id), self._dialled.get(first.node_id)
        if reservation is None and (dialled is None or dialled[1] + DIALLED_S < self._clock.monotonic_s()):
            raise NotHeld(f"{short(first.node_id)} holds no reservation here")
        async with self._connection(caller, self._count_ask(context), first.node_id) as connection:
            if reservation is not None:
                await self._join(context, connection, reservation)
            elif dialled is not None:
                await self._dial(context, connection, dialled[0])

    async def _dial(self, context: Context, connection: _Connection, endpoint: str) -> None:
        """A connection to a node that proved its key there, for a caller whose network does not let it dial that."""
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{endpoint} does not answer: {type(error).__name__}") from None

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            await until_first_ends(
                self._pass_on(connection, lambda: _data_of(context), write),
                self._pass_on(
                    connection,
                    lambda: reader.read(FRAME_BYTES),
                    lambda data: context.write(pb.ConnectResponse(data=data)),
                ),
            )
        finally:
            writer.transport.abort()  # what was not taken is lost, as at the end of any connection

    async def _join(self, context: Context, connection: _Connection, reservation: _Reservation) -> None:
        """A connection to a node that holds a reservation, once it took it."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        asked = self._asked[ticket] = _Asked(reservation.node_id, asyncio.get_running_loop().create_future())
        try:
            reservation.tickets.put_nowait(pb.ReserveResponse(ticket=ticket, origin=self._origin_of(connection.subnet)))
            reservation.num_tickets += 1
            async with asyncio.timeout(ACCEPT_S):
                far = await asked.taken
        except (TimeoutError, asyncio.QueueFull):
            raise Unavailable(f"{short(reservation.node_id)} did not take the connection") from None
        finally:
            del self._asked[ticket]
        try:
            await until_first_ends(
                self._pass_on(
                    connection,
                    lambda: _data_of(context),
                    lambda data: far.context.write(pb.AcceptResponse(data=data)),
                ),
                self._pass_on(
                    connection,
                    lambda: _data_of(far.context),
                    lambda data: context.write(pb.ConnectResponse(data=data)),
                ),
                _until_set(far.is_gone),
            )
        finally:
            far.is_over.set()

    def _origin_of(self, subnet: str) -> bytes:
        return hashlib.blake2b(subnet.encode(), key=self._salt, digest_size=ORIGIN_BYTES).digest()

    @rpc
    async def Accept(self, request_iterator: Any, context: Context) -> None:
        """The other end; the call lasts as long as the connection, whose bytes `Connect` passes on."""
        node_id = self._sessions.require(context)
        first = await self._first(context)
        asked = self._asked.get(first.ticket)
        reservation = self._reservations.get(node_id)
        is_expected = reservation is not None and reservation.num_tickets > 0
        if reservation is not None:
            reservation.num_tickets = max(0, reservation.num_tickets - 1)
        if asked is None or asked.node_id != node_id or asked.taken.done():
            error = NotHeld("nobody waits for this ticket")  # any more: who waited may have gone meanwhile
            raise error if is_expected else self._sessions.refused(context.peer(), error)
        far = _FarEnd(context)
        asked.taken.set_result(far)
        try:
            await far.is_over.wait()
        finally:
            far.is_gone.set()

    @asynccontextmanager
    async def _connection(self, caller: NodeId, subnet: str, node_id: NodeId) -> AsyncGenerator[_Connection]:
        """A connection within the bounds, for as long as it lasts. Raises Unavailable at a bound, or when another one
        took its place."""
        limits, own = self.limits, self._connections_to.setdefault(node_id, FairTable())
        try:
            async with asyncio.timeout(None) as ending:
                connection = _Connection(caller, subnet, node_id, ending)
                if self._num_of_caller[caller] >= limits.connections_per_caller:
                    raise Unavailable(f"{limits.connections_per_caller} connections of yours are open here")
                if len(self._connections.of(subnet)) >= limits.connections_per_subnet:
                    raise Unavailable(f"{limits.connections_per_subnet} connections of your network are open here")
                if len(own) >= limits.connections_per_node:
                    self._replace(connection, own, "to this node")
                if len(self._connections) >= limits.connections:
                    self._replace(connection, self._connections, "in all")
                self._connections.add(subnet, connection)
                own.add(subnet, connection)
                self._num_of_caller[caller] += 1
                try:
                    yield connection
                finally:
                    self._forget_connection(connection)
        except TimeoutError:
            raise Unavailable("the connection made room for another one; try another relay") from None
        finally:
            if not own and self._connections_to.get(node_id) is own:
                del self._connections_to[node_id]

    def _replace(self, newcomer: _Connection, connections: FairTable[str, _Connection], which: str) -> None:
        """Ends the newest connection of a caller of lower standing; else of the subnet with most."""
        standing = self._standing(newcomer.caller)
        every = [connection for subnet in connections.parties for connection in connections.of(subnet)]
        lower = [connection for connection in every if self._standing(connection.caller) < standing]
        if lower:
            found = lower[-1]
        else:
            most = connections.longest(beside=newcomer.subnet)
            if most is None:
                raise Unavailable(f"{len(connections)} relayed connections {which} are open; try another relay")
            found = connections.newest(most)
        found.ending.reschedule(asyncio.get_running_loop().time())
        self._forget_connection(found)

    def _forget_connection(self, connection: _Connection) -> None:
        if self._connections.remove(connection.subnet, connection):
            self._connections_to[connection.node_id].remove(connection.subnet, connection)
            self._num_of_caller[connection.caller] -= 1
            if not self._num_of_caller[connection.caller]:
                del self._num_of_caller[connection.caller]

    async def _first(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first: Any = await context.read()
        except TimeoutError:
            first = _EOF
        if first is _EOF:
            raise Unavailable(f"no first message within {FIRST_MESSAGE_S:.0f} s")
        return first

    async def _pass_on(
        self,
        connection: _Connection,
        read: Callable[[], Awaitable[bytes]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """One direction, until an end closes it, sends no bytes, or takes none for long."""
        with suppress(*_ENDINGS):
            while True:
                async with asyncio.timeout(self.limits.idle_s):
                    data = await read()
                if not 0 < len(data) <= FRAME_BYTES:
                    return
                await self._budget.take(len(data), connection.caller, connection.subnet)
                async with asyncio.timeout(self.limits.idle_s):
                    await write(data)

    # --- the directory, for those who reach none of its peers ----------------------------------------

    @rpc
    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        """Puts the caller's own advert into the directory."""
        node_id, _, directory = self._record_call(context)
        author = author_of(request.advert)
        if author is None or node_id_of(author[0]) != node_id:
            raise TooLarge("an advert of the caller is expected")
        if not await directory.pass_on(request.advert):
            raise Unavailable("the advert is none of this run, or there is no room for it")
        return pb.AnnounceResponse()

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        """The adverts that this node knows."""
        node_id, subnet, directory = self._record_call(context)
        records = await directory.records()
        with suppress(*_ENDINGS):
            for at in range(0, len(records), MAX_RECORDS):
                adverts = records[at : at + MAX_RECORDS]
                await self._budget.take(sum(map(len, adverts)), node_id, subnet)
                async with asyncio.timeout(self.limits.idle_s):
                    await context.write(pb.LookupResponse(adverts=adverts))

    def _record_call(self, context: Context) -> tuple[NodeId, str, RecordKeeper]:
        node_id, directory = self._sessions.require(context), self._directory()
        self._require_open()
        if directory is None:
            raise Unavailable("this node has no directory")
        subnet, now_s = peer_subnet(context.peer()), self._clock.monotonic_s()
        if not (self._records.spend(node_id, now_s) and self._records_of.spend(subnet, now_s)):
            raise self._sessions.refused(context.peer(), Unavailable("too many look-ups; slow down"))
        return node_id, subnet, directory


async def _data_of(context: Context) -> bytes:
    """The bytes of the next message of a call; none at its end."""
    message: Any = await context.read()
    return b"" if message is _EOF else message.data


def is_loopback(host: str) -> bool:
    """Whether a caller's address says no more than that something on this machine called."""
    return ipaddress.ip_address(host).is_loopback


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()
