"""Server side of a relay: holds reservations of nodes that cannot be dialled, and forwards bytes to them.

Invariant: both ends proved their keys to this node and prove them to each other on the forwarded connection, which the
relay cannot read. At most two frames wait here in each direction, besides kernel buffers. `reservation_table.py` bounds
reservations and connections, `byte_budget.py` bounds bytes.
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
FRAMES_PER_S: Final = 256  # at least, over all connections
ACCEPT_S: Final = 5.0  # for a node to take a connection
DIAL_BACK_S: Final = 3.0
ORIGIN_BYTES: Final = 8
MAX_RECORDS: Final = 256  # in one message
RECORD_CALLS_PER_S: Final = 0.5  # look-ups and announcements of one node
RECORD_CALLS_BURST: Final = 8.0
RECORD_CALLS_OF_SUBNET: Final = 16  # times the bound of one node
# Announcements of nodes without a reservation here, each of which costs the directory milliseconds: in all, and of one
# subnet, so that two subnets cannot use up the first bound.
ANNOUNCED_PER_S: Final = 16.0
ANNOUNCED_BURST: Final = 64.0
ANNOUNCED_OF_SUBNET_PER_S: Final = 1.0
ANNOUNCED_OF_SUBNET_BURST: Final = 8.0
# Kernel buffer of each direction: SOCKET_BYTES for each of the first connections; later ones share SOCKETS_BYTES. With
# full buffers 512 connections would pin gigabytes.
SOCKETS_BYTES: Final = 8 * 2**20
LEAST_SOCKET_BYTES: Final = 32 * 1024
_ENDINGS: Final = (OSError, TimeoutError, grpc.aio.AioRpcError, grpc.aio.BaseError)


@dataclass(eq=False, slots=True)
class _Asked:
    """A requested connection that its node has not accepted yet."""

    node_id: NodeId
    taken: asyncio.Future[socket.socket]
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # the connection ended, or its caller left


class RelayServicer(pb_grpc.RelayServiceServicer):
    """gRPC service of a relay: dial-back, reservations, forwarded connections, and records of the directory.

    Args:
        sessions: authenticates callers.
        clock: clock of the rate limits.
        limits: bounds of connections and bytes.
        is_open: False while this node does not relay, because it cannot be dialled itself.
        standing: rank of a node; reservations and connections of lower rank make room first.
        directory: returns the keeper of adverts, or None if there is none.
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
        self._salt = secrets.token_bytes(16)  # prevents choosing a subnet whose origin equals another's
        self._asked: dict[bytes, _Asked] = {}
        self._port = TicketPort()
        self._budget = ByteBudget(clock, limits.bytes_per_s, limits.burst_bytes)
        # Frames are not split, so a low budget needs small ones: each connection then gets a frame every few seconds.
        self._frame_bytes = min(FRAME_BYTES, max(ByteBudget.LEAST_BYTES, limits.bytes_per_s // FRAMES_PER_S))
        self._num_sockets = 0  # connections that were taken by socket, since the start
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
        """Opens the ticket port (0 picks a free one) at the host of `listen`, if relaying is on. Raises ConfigError."""
        if self.limits.reservations:
            self.table.limits = replace(self.limits, connections=places_for_relayed(self.limits.connections))
            await self._port.start(listen.rpartition(":")[0], number)

    @property
    def port(self) -> int:
        """The ticket port; 0 while it is closed."""
        return self._port.number

    async def close_port(self) -> None:
        """Closes the ticket port."""
        await self._port.close()

    @property
    def free_reservations(self) -> int:
        """Number of free reservations; 0 while this node does not relay."""
        return self.table.num_free if self._is_open() else 0

    def status(self) -> JsonDict:
        """Current load and totals of relaying."""
        return {
            "reservations": len(self.table),
            "connections": self.table.num_connections,
            "bytes": self._budget.num_bytes,
            "sockets": self._num_sockets,
        }

    # --- dial-back ------------------------------------------------------------------------------------

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        """Dials the caller at the address of this call, where it must prove the key of this call."""
        node_id, host = self._sessions.require(context), peer_key(context.peer())[0]
        self._require_open()
        check_port(request.port)
        if is_loopback(host):  # also of a tunnel; success would not show that other machines can dial the caller
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
        """Holds the caller's reservation and sends the tickets for it; ends an older reservation of the same node."""
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
            raise Unavailable("another reservation took the place of this one") from None

    def _count_ask(self, context: Context) -> str:
        """Counts a request for a reservation or connection. Returns the caller's subnet; raises Unavailable."""
        subnet = peer_subnet(context.peer())
        try:
            self.table.count_ask(subnet, self._clock.monotonic_s())
        except Unavailable as error:
            raise self._sessions.refused(context.peer(), error) from None
        return subnet

    # --- connections -------------------------------------------------------------------------------

    @rpc
    async def Connect(self, request_iterator: Any, context: Context) -> None:
        """Serves the caller's end of a connection: offers it to the requested node, then forwards bytes."""
        caller = self._sessions.require(context)
        self._require_open()
        first = await self._first(context)
        if not is_hex_digest(first.node_id) or first.data:
            raise TooLarge("the first message names a node, and nothing else")
        subnet = self._count_ask(context)  # also for nodes that are not here
        way = self.table.way_to(first.node_id, self._clock.monotonic_s())
        async with self._connection(caller, subnet, first.node_id) as connection:
            if isinstance(way, HeldReservation):
                await self._join(context, connection, way)
            else:
                await self._dial(context, connection, way)

    async def _dial(self, context: Context, connection: RelayedConnection, endpoint: str) -> None:
        """Dials a node that proved its key at `endpoint`, and forwards bytes, for a caller that cannot dial it."""
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                far = await dial(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{endpoint} does not answer: {type(error).__name__}") from None
        await self._lead(context, connection, far)

    async def _join(self, context: Context, connection: RelayedConnection, reservation: HeldReservation) -> None:
        """Forwards bytes to a node with a reservation, once the node accepts the connection."""
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
        """Forwards bytes between the caller and the far end, then closes both."""
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
        """Yields the socket of the caller's end, and a future that is done when its call ends, or None.

        The socket showed its ticket at the ticket port; or, with None, it is one of a local pair, and the gRPC call
        carries its bytes.
        """
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
        """Sends the ticket to a caller that may never read it, and waits for its socket or its first bytes."""
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
        """Serves the requested node's end of a connection for as long as it lasts; `Connect` forwards the bytes."""
        node_id = self._sessions.require(context)
        first = await self._first(context)
        asked = self._asked.get(first.ticket)
        reservation = self.table.get(node_id)
        if asked is None or asked.node_id != node_id or asked.taken.done():
            is_expected = reservation is not None and reservation.count_shown()
            error = NotHeld("nobody waits for this ticket")  # the caller may have left
            raise error if is_expected else self._sessions.refused(context.peer(), error)
        far, own = local_pair()
        asked.taken.set_result(far)
        # a node that reads nothing of its call would keep the call and a socket for ever
        await until_first_ends(_bridge(context, pb.AcceptResponse, own), _until_set(asked.is_over))

    @asynccontextmanager
    async def _connection(self, caller: NodeId, subnet: str, node_id: NodeId) -> AsyncGenerator[RelayedConnection]:
        """Counts a connection while the block runs. Raises Unavailable at a bound, or if another replaces it."""
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
        """Data to forward, at once or when the byte budget allows it."""
        room = self._budget.ask(len(data), connection.caller, connection.subnet)
        return data if room is None else _after(room, data)

    # --- directory, for nodes that reach none of its peers --------------------------------------------

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
            raise Unavailable("the advert is of another run, older than the known one, or of a clock that is off")
        if reservation is not None:
            reservation.advert = request.advert
        return pb.AnnounceResponse()

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        """Sends the adverts that this node knows."""
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
    """Bytes of the next message of a call; empty at its end."""
    message: Any = await context.read()
    return b"" if message is EOF else message.data


async def _bridge(context: Context, message: Callable[..., Any], own: socket.socket, first: bytes = b"") -> None:
    """Copies bytes between a call and a socket, then closes the socket. `first`: bytes of the call that were read."""
    try:
        own.setblocking(False)
        with suppress(*_ENDINGS):
            await asyncio.get_running_loop().sock_sendall(own, first)
            await pump(context, message, own)
    finally:
        own.close()  # the peer socket can still read what is buffered


async def _after(room: asyncio.Future[None], data: bytes) -> bytes:
    await room
    return data


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()
