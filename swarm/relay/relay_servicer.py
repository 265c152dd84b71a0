"""What a relay does for nodes that cannot be dialled: it holds their places, and passes on bytes.

Invariant: both ends proved their keys to this node, and what passes is a connection that they prove to each other; the
relay looks at none of it and needs no trust. At most one frame of each direction waits here; `place_table.py` bounds
places and connections.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import grpc

from swarm.clock import Clock
from swarm.errors import NotHeld, TooLarge, Unavailable
from swarm.flow import BoundedTable, RateLimiter
from swarm.identity import is_hex_digest, node_id_of
from swarm.interfaces import RecordKeeper
from swarm.relay.place_table import ByteBudget, Place, PlaceTable, RelayLimits
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
TICKET_BYTES: Final = 16
MAX_DIALLED: Final = 4096
MAX_RECORDS: Final = 256  # in one message
RECORD_CALLS_PER_S: Final = 0.5  # look-ups and announcements of one node
RECORD_CALLS_BURST: Final = 8.0
_ENDINGS: Final = (OSError, TimeoutError, grpc.aio.AioRpcError, grpc.aio.InternalError, grpc.aio.AbortError)
_EOF: Final = cast(Any, grpc.aio).EOF  # what a read gives at the end of a stream


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
        standing: of a node; places of those of lower standing make room first.
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
        self._directory = directory
        self._dialled = BoundedTable[NodeId, str](MAX_DIALLED)  # host:port where a node proved its key to us
        self._records = RateLimiter[NodeId](RECORD_CALLS_PER_S, RECORD_CALLS_BURST, MAX_DIALLED)
        self._sessions, self._clock, self.limits = sessions, clock, limits
        self._is_open = is_open
        self._places = PlaceTable(limits, standing)
        self._asked: dict[bytes, _Asked] = {}
        self._budget = ByteBudget(clock, limits.bytes_per_s, limits.burst_bytes)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to a server."""
        add: Any = pb_grpc.add_RelayServiceServicer_to_server
        add(self, server)

    @property
    def free_places(self) -> int:
        """Places that nobody holds; 0 where this node does not relay."""
        return self._places.num_free if self._is_open() else 0

    def status(self) -> JsonDict:
        """What relaying costs now, and has cost."""
        return {
            "places": len(self._places),
            "connections": self._places.num_connections,
            "bytes": self._budget.num_bytes,
        }

    # --- whether the caller can be dialled ---------------------------------------------------------

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        """Connects to the caller's own address; it must prove the key of this call there."""
        node_id, host = self._sessions.require(context), peer_key(context.peer())[0]
        self._require_open()
        if not 0 < request.port < 65536:
            raise TooLarge(f"port {request.port}, expected 1 to 65535")
        try:
            self._places.take_dial_back(peer_subnet(context.peer()), self._clock.monotonic_s())
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
            self._dialled[node_id] = f"{host}:{request.port}"
        except Unavailable as error:
            self._dialled.pop(node_id, None)
            detail = str(error)[:200]
        return pb.DialBackResponse(host=host, is_reached=not detail, detail=detail)

    def _require_open(self) -> None:
        if not self._is_open():
            raise Unavailable("this node does not relay")

    # --- places ------------------------------------------------------------------------------------

    @rpc
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> None:
        """Holds the caller's place and tells it of connections; a newer place of the same node ends the older one."""
        node_id = self._sessions.require(context)
        self._require_open()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as ending:
                place = self._places.add(node_id, peer_subnet(context.peer()), lambda: ending.reschedule(loop.time()))
                try:
                    await context.write(pb.ReserveResponse())
                    while True:
                        await context.write(pb.ReserveResponse(ticket=await place.tickets.get()))
                finally:
                    self._places.remove(place)
        except TimeoutError:
            raise Unavailable("the place is another's now") from None

    # --- connections -------------------------------------------------------------------------------

    @rpc
    async def Connect(self, request_iterator: Any, context: Context) -> None:
        """One end of a connection: tells the node that is asked for, and passes on bytes once it took it."""
        caller = self._sessions.require(context)
        self._require_open()
        first = await self._first(context)
        if not is_hex_digest(first.node_id) or first.data:
            raise TooLarge("the first message names a node, and nothing else")
        place, dialled = self._places.get(first.node_id), self._dialled.get(first.node_id)
        if place is None and dialled is None:
            raise NotHeld(f"{short(first.node_id)} holds no place here")
        with self._places.connection(first.node_id, caller, peer_subnet(context.peer())):
            if place is not None:
                await self._join(context, first.node_id, place)
            elif dialled is not None:
                await self._dial(context, dialled)

    async def _dial(self, context: Context, endpoint: str) -> None:
        """A connection to a node that proved its key there, for a caller whose network does not let it dial that."""
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{endpoint} does not answer: {type(error).__name__}") from None

        async def send() -> None:
            while (message := await self._read(context)) is not None:
                writer.write(message.data)
                await writer.drain()

        async def receive() -> None:
            while data := await reader.read(FRAME_BYTES):
                await self._budget.take(len(data))
                await context.write(pb.ConnectResponse(data=data))

        try:
            with suppress(*_ENDINGS):
                await until_first_ends(send(), receive())
        finally:
            writer.close()

    async def _join(self, context: Context, node_id: NodeId, place: Place) -> None:
        """A connection to a node that holds a place, once it took it."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        asked = self._asked[ticket] = _Asked(node_id, asyncio.get_running_loop().create_future())
        try:
            place.tickets.put_nowait(ticket)
            async with asyncio.timeout(ACCEPT_S):
                far = await asked.taken
        except (TimeoutError, asyncio.QueueFull):
            raise Unavailable(f"{short(node_id)} did not take the connection") from None
        finally:
            del self._asked[ticket]
        try:
            await until_first_ends(
                self._pass_on(context, far.context, pb.AcceptResponse),
                self._pass_on(far.context, context, pb.ConnectResponse),
                _until_set(far.is_gone),
            )
        finally:
            far.is_over.set()

    @rpc
    async def Accept(self, request_iterator: Any, context: Context) -> None:
        """The other end; the call lasts as long as the connection, whose bytes `Connect` passes on."""
        node_id = self._sessions.require(context)
        first = await self._first(context)
        asked = self._asked.get(first.ticket)
        if asked is None or asked.node_id != node_id or asked.taken.done():
            raise NotHeld("nobody waits for this ticket")
        far = _FarEnd(context)
        asked.taken.set_result(far)
        try:
            await far.is_over.wait()
        finally:
            far.is_gone.set()

    async def _first(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first: Any = await context.read()
        except TimeoutError:
            first = _EOF
        if first is _EOF:
            raise Unavailable(f"no first message within {FIRST_MESSAGE_S:.0f} s")
        return first

    async def _pass_on(self, source: Context, target: Context, response_of: Callable[..., Any]) -> None:
        """One direction, until an end closes it, sends no bytes, or takes none for long."""
        with suppress(*_ENDINGS):
            while (message := await self._read(source)) is not None:
                async with asyncio.timeout(self.limits.idle_s):
                    await target.write(response_of(data=message.data))

    async def _read(self, source: Context) -> Any:
        """The next message, once there is room for it; None at the end, also of patience."""
        try:
            async with asyncio.timeout(self.limits.idle_s):
                message: Any = await source.read()
        except TimeoutError:
            return None
        if message is _EOF or not 0 < len(message.data) <= FRAME_BYTES:
            return None
        await self._budget.take(len(message.data))
        return message

    # --- the directory, for those who reach none of its peers ----------------------------------------

    @rpc
    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        """Puts the caller's own advert into the directory."""
        node_id, directory = self._record_call(context)
        author = author_of(request.advert)
        if author is None or node_id_of(author[0]) != node_id:
            raise TooLarge("an advert of the caller is expected")
        if not await directory.pass_on(request.advert):
            raise Unavailable("the advert is none of this run, or there is no room for it")
        return pb.AnnounceResponse()

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        """The adverts that this node knows."""
        _, directory = self._record_call(context)
        records = await directory.records()
        for at in range(0, len(records), MAX_RECORDS):
            async with asyncio.timeout(self.limits.idle_s):
                await context.write(pb.LookupResponse(adverts=records[at : at + MAX_RECORDS]))

    def _record_call(self, context: Context) -> tuple[NodeId, RecordKeeper]:
        node_id, directory = self._sessions.require(context), self._directory()
        self._require_open()
        if directory is None:
            raise Unavailable("this node has no directory")
        if not self._records.spend(node_id, self._clock.monotonic_s()):
            raise self._sessions.refused(context.peer(), Unavailable("too many look-ups; slow down"))
        return node_id, directory


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()
