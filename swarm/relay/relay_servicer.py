"""What a relay does for nodes that cannot be dialled: it holds their reservations, and passes on bytes.

Invariant: both ends proved their keys to this node, and what passes is a connection that they prove to each other; the
relay looks at none of it and needs no trust. Of each direction two frames wait here at most, beside what the kernel
keeps; `reservation_table.py` bounds reservations and connections, `byte_budget.py` bytes.
"""

import asyncio
import hashlib
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import grpc

from swarm.addresses import is_loopback
from swarm.clock import Clock
from swarm.errors import NotHeld, TooLarge, Unavailable
from swarm.flow import RateLimiter, TokenBucket
from swarm.identity import is_hex_digest, node_id_of
from swarm.interfaces import RecordKeeper
from swarm.open_files import places_for_relayed
from swarm.relay.byte_budget import ByteBudget
from swarm.relay.reservation_table import (
    MAX_DIALLED,
    MAX_SUBNETS,
    TICKETS_BURST,
    TICKETS_PER_S,
    HeldReservation,
    RelayedConnection,
    RelayLimits,
    ReservationTable,
    Ticket,
    check_port,
)
from swarm.relay.ticket_port import TICKET_BYTES, TicketPort
from swarm.relay.tunnel import (
    EOF,
    FRAME_BYTES,
    SOCKET_BYTES,
    limit_buffers,
    local_pair,
    pump,
    reset,
    splice,
    until_first_ends,
)
from swarm.types import JsonDict, NodeId, short
from swarm.wire.adverts import author_of
from swarm.wire.connection_limits import peer_key, peer_subnet
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.host_names import dial
from swarm.wire.server import Sessions
from swarm.wire.session import open_channel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1 import relay_service_pb2_grpc as pb_grpc

FIRST_MESSAGE_S: Final = 5.0
FRAMES_PER_S: Final = 256  # at least, of all connections together
ACCEPT_S: Final = 5.0  # for a node to take a connection that somebody asked for
DIAL_BACK_S: Final = 3.0
ORIGIN_BYTES: Final = 8
MAX_RECORDS: Final = 256  # in one message
RECORD_CALLS_PER_S: Final = 0.5  # look-ups and announcements of one node
RECORD_CALLS_BURST: Final = 8.0
RECORD_CALLS_OF_SUBNET: Final = 16  # times that
ANNOUNCED_PER_S: Final = 16.0  # of all together who hold no reservation here: each costs the directory milliseconds
ANNOUNCED_BURST: Final = 64.0
ANNOUNCED_OF_SUBNET_PER_S: Final = 1.0  # of them: two subnets would use up what all have
ANNOUNCED_OF_SUBNET_BURST: Final = 8.0
# That the kernel keeps of each direction of the first connections, as many as have SOCKET_BYTES each; a later one has
# its share, and 512 of them five times that: with SOCKET_BYTES each, and what the kernel adds, they had gigabytes.
SOCKETS_BYTES: Final = 8 * 2**20
LEAST_SOCKET_BYTES: Final = 32 * 1024
_ENDINGS: Final = (OSError, TimeoutError, grpc.aio.AioRpcError, grpc.aio.BaseError)


@dataclass(eq=False, slots=True)
class _Asked:
    """A connection that was asked for and not taken yet."""

    node_id: NodeId
    taken: asyncio.Future[socket.socket]
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # the connection, or nobody waits for it any more


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
        self._is_open, self._directory = is_open, directory
        self.table = ReservationTable(limits, standing)
        self._salt = secrets.token_bytes(16)  # so that nobody can choose a subnet with the origin of another
        self._asked: dict[bytes, _Asked] = {}
        self._port = TicketPort()
        self._budget = ByteBudget(clock, limits.bytes_per_s, limits.burst_bytes)
        # A frame passes whole: where many wait for a little, each hears from the other end every few seconds.
        self._frame_bytes = min(FRAME_BYTES, max(ByteBudget.LEAST_BYTES, limits.bytes_per_s // FRAMES_PER_S))
        self._num_sockets = 0  # of nodes that took a connection by one, so far
        self._records = RateLimiter[NodeId](RECORD_CALLS_PER_S, RECORD_CALLS_BURST, MAX_DIALLED)
        self._records_of = RateLimiter[str](
            RECORD_CALLS_OF_SUBNET * RECORD_CALLS_PER_S, RECORD_CALLS_OF_SUBNET * RECORD_CALLS_BURST, MAX_SUBNETS
        )
        self._announced = TokenBucket(ANNOUNCED_PER_S, ANNOUNCED_BURST, clock.monotonic_s())
        self._announced_of = RateLimiter[str](ANNOUNCED_OF_SUBNET_PER_S, ANNOUNCED_OF_SUBNET_BURST, MAX_SUBNETS)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to a server."""
        add: Any = pb_grpc.add_RelayServiceServicer_to_server
        add(self, server)

    async def open_port(self, listen: str, number: int) -> None:
        """Takes the ends of connections as sockets, too, at the host where we listen. Raises ConfigError.

        Args:
            listen: host:port of the server.
            number: of the port; 0 picks a free one.
        """
        if self.limits.reservations:
            self.table.limits = replace(self.limits, connections=places_for_relayed(self.limits.connections))
            await self._port.start(listen.rpartition(":")[0], number)

    @property
    def port(self) -> int:
        """Where ends of connections are sockets; 0: nowhere."""
        return self._port.number

    async def close_port(self) -> None:
        """Takes none any more."""
        await self._port.close()

    @property
    def free_reservations(self) -> int:
        """Reservations that nobody holds; 0 where this node does not relay."""
        return self.table.num_free if self._is_open() else 0

    def status(self) -> JsonDict:
        """What relaying costs now, and has cost."""
        return {
            "reservations": len(self.table),
            "connections": self.table.num_connections,
            "bytes": self._budget.num_bytes,
            "sockets": self._num_sockets,
        }

    # --- whether the caller can be dialled ---------------------------------------------------------

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        """Connects to the caller's own address; it must prove the key of this call there."""
        node_id, host = self._sessions.require(context), peer_key(context.peer())[0]
        self._require_open()
        check_port(request.port)
        if is_loopback(host):  # also who comes through a tunnel: whatever listens there, others do not reach it so
            raise Unavailable("the call comes from this machine: ask a node elsewhere")
        try:
            self.table.count_dial_back(peer_subnet(context.peer()), self._clock.monotonic_s())
        except Unavailable as error:
            raise self._sessions.refused(context.peer(), error) from None
        host = f"[{host}]" if ":" in host else host
        detail = ""
        try:
            channel = await open_channel(
                f"{host}:{request.port}", node_id, self._sessions.identity, self._sessions.run_id, DIAL_BACK_S,
                self._clock, credential=None,
            )  # fmt: skip
            await channel.close()
            self.table.note_dialled(node_id, f"{host}:{request.port}", self._clock.monotonic_s())
        except Unavailable as error:
            self.table.note_dialled(node_id, "", self._clock.monotonic_s())
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
        subnet, loop = self._count_ask(context), asyncio.get_running_loop()
        tickets = TokenBucket(TICKETS_PER_S, TICKETS_BURST, self._clock.monotonic_s())
        try:
            async with asyncio.timeout(None) as ending:
                reservation = self.table.add(node_id, subnet, lambda: ending.reschedule(loop.time()))
                try:
                    await context.write(pb.ReserveResponse(port=self._port.number))
                    while True:
                        while not tickets.try_take(self._clock.monotonic_s()):  # noqa: ASYNC110 - the clock decides
                            await asyncio.sleep(1 / TICKETS_PER_S)
                        next_one = await reservation.next_ticket()
                        await context.write(pb.ReserveResponse(ticket=next_one.ticket, origin=next_one.origin))
                finally:
                    self.table.remove(reservation)
        except TimeoutError:
            raise Unavailable("the reservation is another's now") from None

    def _count_ask(self, context: Context) -> str:
        """The subnet of who asks for a reservation or a connection. Raises Unavailable where it asks too often."""
        subnet = peer_subnet(context.peer())
        try:
            self.table.count_ask(subnet, self._clock.monotonic_s())
        except Unavailable as error:
            raise self._sessions.refused(context.peer(), error) from None
        return subnet

    # --- connections -------------------------------------------------------------------------------

    @rpc
    async def Connect(self, request_iterator: Any, context: Context) -> None:
        """One end of a connection: tells the node that is asked for, and passes on bytes once it took it."""
        caller = self._sessions.require(context)
        self._require_open()
        first = await self._first(context)
        if not is_hex_digest(first.node_id) or first.data:
            raise TooLarge("the first message names a node, and nothing else")
        subnet = self._count_ask(context)  # also of who asks for nodes that are not here
        way = self.table.way_to(first.node_id, self._clock.monotonic_s())
        async with self._connection(caller, subnet, first.node_id) as connection:
            if isinstance(way, HeldReservation):
                await self._join(context, connection, way)
            else:
                await self._dial(context, connection, way)

    async def _dial(self, context: Context, connection: RelayedConnection, endpoint: str) -> None:
        """A connection to a node that proved its key there, for a caller whose network does not let it dial that."""
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                far = await dial(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{endpoint} does not answer: {type(error).__name__}") from None
        await self._lead(context, connection, far)

    async def _join(self, context: Context, connection: RelayedConnection, reservation: HeldReservation) -> None:
        """A connection to a node that holds a reservation, once it took it."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        taken: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        asked = self._asked[ticket] = _Asked(reservation.node_id, taken)
        try:
            with self._port.awaited(ticket, taken):
                try:
                    reservation.ask(Ticket(ticket, self._origin_of(connection.subnet)))
                    async with asyncio.timeout(ACCEPT_S):
                        far = await taken
                except TimeoutError:
                    raise Unavailable(f"{short(reservation.node_id)} did not take the connection") from None
                finally:
                    del self._asked[ticket]
                    reservation.waiting.pop(ticket, None)
            reservation.count_shown()
            self._num_sockets += far.family != socket.AF_UNIX
            await self._lead(context, connection, far)
        finally:
            asked.is_over.set()

    async def _lead(self, context: Context, connection: RelayedConnection, far: socket.socket) -> None:
        """Passes on bytes between the caller and the end that took the connection, which is closed with it."""
        room = max(LEAST_SOCKET_BYTES, min(SOCKET_BYTES, SOCKETS_BYTES // max(1, self.table.num_connections)))
        limit_buffers(far, room)
        try:
            async with self._near_end(context) as (near, over):
                limit_buffers(near, room)
                await splice(
                    near,
                    far,
                    over,
                    frame=partial(self._frame, connection),
                    frame_bytes=self._frame_bytes,
                    own_idle_s=self.limits.idle_s,
                    other_idle_s=self.limits.idle_s,
                )
        finally:
            reset(far)

    @asynccontextmanager
    async def _near_end(self, context: Context) -> AsyncGenerator[tuple[socket.socket, asyncio.Future[Any] | None]]:
        """The caller's end, and what ends with its call: a socket that shows its ticket, else one behind which is the
        call, from its first bytes on."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        shown: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        first = asyncio.ensure_future(_data_of(context))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            with self._port.awaited(ticket, shown):
                await self._offer(context, pb.ConnectResponse(ticket=ticket, port=self._port.number), first, shown)
            if shown.done():
                yield shown.result(), first
                return
            data = first.result()
            near, own = local_pair()
            tasks.append(asyncio.ensure_future(_bridge(context, pb.ConnectResponse, own, data)))
            yield near, None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _offer(self, context: Context, taken: pb.ConnectResponse, *ways: asyncio.Future[Any]) -> None:
        """Tells the caller, who may read nothing of its call, and waits for one of the ways to its end."""
        try:
            async with asyncio.timeout(self.limits.idle_s):
                await context.write(taken)
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise Unavailable(f"no byte came for {self.limits.idle_s:.0f} s") from None

    def _origin_of(self, subnet: str) -> bytes:
        return hashlib.blake2b(subnet.encode(), key=self._salt, digest_size=ORIGIN_BYTES).digest()

    @rpc
    async def Accept(self, request_iterator: Any, context: Context) -> None:
        """The other end; the call lasts as long as the connection, whose bytes `Connect` passes on."""
        node_id = self._sessions.require(context)
        first = await self._first(context)
        asked = self._asked.get(first.ticket)
        reservation = self.table.get(node_id)
        if asked is None or asked.node_id != node_id or asked.taken.done():
            is_expected = reservation is not None and reservation.count_shown()
            error = NotHeld("nobody waits for this ticket")  # any more: who waited may have gone meanwhile
            raise error if is_expected else self._sessions.refused(context.peer(), error)
        far, own = local_pair()
        asked.taken.set_result(far)
        # a node that reads nothing of its call would keep it, and a socket, for as long as it likes
        await until_first_ends(_bridge(context, pb.AcceptResponse, own), _until_set(asked.is_over))

    @asynccontextmanager
    async def _connection(self, caller: NodeId, subnet: str, node_id: NodeId) -> AsyncGenerator[RelayedConnection]:
        """A connection within the bounds, for as long as it lasts. Raises Unavailable at a bound, or when another one
        took its place."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as ending:
                with self.table.connection(node_id, caller, subnet, lambda: ending.reschedule(loop.time())) as counted:
                    yield counted
        except TimeoutError:
            raise Unavailable("the connection made room for another one; try another relay") from None

    async def _first(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first: Any = await context.read()
        except TimeoutError:
            first = EOF
        if first is EOF:
            raise Unavailable(f"no first message within {FIRST_MESSAGE_S:.0f} s")
        return first

    def _frame(self, connection: RelayedConnection, data: bytes) -> bytes | Awaitable[bytes]:
        """What is passed on for what came, within the budget of bytes."""
        room = self._budget.ask(len(data), connection.caller, connection.subnet)
        return data if room is None else _after(room, data)

    # --- the directory, for those who reach none of its peers ----------------------------------------

    @rpc
    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        """Puts the caller's own advert into the directory."""
        node_id, subnet, directory = self._record_call(context)
        author = author_of(request.advert)
        if author is None or node_id_of(author[0]) != node_id:
            raise TooLarge("an advert of the caller is expected")
        reservation, now_s = self.table.get(node_id), self._clock.monotonic_s()
        if reservation is None and not (self._announced_of.try_take(subnet, now_s) and self._announced.try_take(now_s)):
            raise Unavailable("too many announcements now; hold a reservation, or try again later")
        if not await directory.pass_on(request.advert):
            raise Unavailable("the advert is none of this run, older than one that is there, or of a clock that is off")
        if reservation is not None:
            reservation.advert = request.advert
        return pb.AnnounceResponse()

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        """The adverts that this node knows."""
        node_id, subnet, directory = self._record_call(context)
        held = set(self.table.adverts())
        records = [*held, *(each for each in await directory.records() if each not in held)]
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
    return b"" if message is EOF else message.data


async def _bridge(context: Context, message: Callable[..., Any], own: socket.socket, first: bytes = b"") -> None:
    """Passes bytes between a call and a socket, which is closed. `first`: that came in the call before."""
    try:
        own.setblocking(False)
        with suppress(*_ENDINGS):
            await asyncio.get_running_loop().sock_sendall(own, first)
            await pump(context, message, own)
    finally:
        own.close()  # the other end reads what is left


async def _after(room: asyncio.Future[None], data: bytes) -> bytes:
    await room
    return data


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()
