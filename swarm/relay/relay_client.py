"""Client side of relays: sessions with relays, and our own reservation at a relay.

Invariant: a relayed connection is treated like any other. It ends at the node's own server or at a channel of its own,
and both ends prove their keys on it. Sockets, calls and tickets are bounded, so a relay needs no trust.
"""

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc

from swarm.addresses import has_whole_loopback, is_service_port, is_wildcard, relayed_endpoint
from swarm.errors import NotHeld, Unauthenticated, Unavailable
from swarm.flow import BoundedTable, TokenBucket
from swarm.interfaces import PeerAddress
from swarm.relay.relay_servicer import ORIGIN_BYTES
from swarm.relay.reservation_table import TICKETS_BURST, TICKETS_PER_S
from swarm.relay.ticket_port import TICKET_BYTES, show_ticket
from swarm.relay.tunnel import pump, splice
from swarm.types import NodeId, short
from swarm.wire.grpc_errors import calling
from swarm.wire.host_names import dial
from swarm.wire.session import AuthenticatedChannel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1 import relay_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CALLS_PER_SESSION: Final = 7  # of the 8 that a coordinator serves on a connection; further calls would wait silently
# A server keeps eight connections of a node and cuts the oldest of more, which would be the one with the reservation.
# Two are left for groups and weights of the relay's own node.
SESSIONS_PER_RELAY: Final = 6
MAX_TAKEN: Final = 64  # connections through one reservation
# A node leaves a relay that sends a third more tickets than relays do.
MOST_TICKETS_PER_S: Final = TICKETS_PER_S * 4 / 3
MOST_TICKETS_BURST: Final = TICKETS_BURST * 4 / 3
LOCAL_DIAL_S: Final = 5.0
IDLE_S: Final = 100.0  # without a byte of a caller; a relay ends a connection after 90 s of silence
SOCKET_S: Final = 1.5  # for a relay to answer at its ticket port
# Pause before a ticket port that did not answer is tried again; it doubles. Until then calls carry the bytes.
AGAIN_S: Final = 5.0
AGAIN_AT_MOST_S: Final = 600.0
MAX_UNREACHED: Final = 1024  # relays whose ticket port did not answer

OpenSession = Callable[[PeerAddress, float], Awaitable[AuthenticatedChannel]]


@dataclass(eq=False, slots=True)
class _Session:
    channel: AuthenticatedChannel
    num_calls: int = 0


class RelaySessions:
    """Sessions with relays; calls to the same relay share its sessions.

    Args:
        open_session: connects to a relay and proves our identity; raises Unavailable.
        endpoint_of: returns the host:port at which we dial a relay.
        timeout_s: timeout of calls with an immediate answer.

    Example:
        async with sessions.call(relay) as (stub, metadata):
            await stub.DialBack(request, metadata=metadata)
    """

    def __init__(self, open_session: OpenSession, endpoint_of: Callable[[PeerAddress], str], timeout_s: float) -> None:
        self._open_session, self._endpoint_of, self.timeout_s = open_session, endpoint_of, timeout_s
        # Relays whose ticket port did not answer: when to try it again, and the pause before that.
        self._unreached = BoundedTable[PeerAddress, tuple[float, float]](MAX_UNREACHED)
        self._open: dict[PeerAddress, list[_Session]] = {}
        self._opening = WeakValueDictionary[PeerAddress, asyncio.Lock]()  # held while a call waits for a session

    @asynccontextmanager
    async def call(self, relay: PeerAddress) -> AsyncGenerator[tuple[Any, Any]]:
        """Yields the stub and metadata for one call to a relay. Raises Unavailable."""
        session = await self._begin(relay)
        is_broken = True  # until it has a token
        try:
            metadata = await session.channel.metadata(self.timeout_s)
            is_broken = False
            yield pb_grpc.RelayServiceStub(session.channel.channel), metadata
        except Unavailable as error:
            # A relayed connection can fail because its far end left, which is no fault of the session.
            is_lost = session.channel.channel.get_state() is not grpc.ChannelConnectivity.READY
            is_broken = is_broken or is_lost or isinstance(error, Unauthenticated)
            raise
        finally:
            await self._end(relay, session, is_broken=is_broken)

    async def _begin(self, relay: PeerAddress) -> _Session:
        """Returns a session with room for one more call, and counts the call. Raises Unavailable."""
        opening = self._opening.setdefault(relay, asyncio.Lock())
        async with opening:
            for session in self._open.get(relay, ()):
                if session.num_calls < CALLS_PER_SESSION:
                    break
            else:
                if len(self._open.get(relay, ())) >= SESSIONS_PER_RELAY:
                    most = SESSIONS_PER_RELAY * CALLS_PER_SESSION
                    raise Unavailable(f"{most} connections through {short(relay.node_id)} are open; take another relay")
                session = _Session(await self._open_session(relay, self.timeout_s))
                self._open.setdefault(relay, []).append(session)
            session.num_calls += 1
            return session

    async def _end(self, relay: PeerAddress, session: _Session, *, is_broken: bool) -> None:
        """Ends a call. A broken session gets no new calls; a session without calls is closed."""
        session.num_calls -= 1
        own = self._open.get(relay, [])
        if session in own and (is_broken or not session.num_calls):
            own.remove(session)
            if not own:
                del self._open[relay]
        if not session.num_calls:
            await session.channel.close()

    async def socket_to(self, relay: PeerAddress, port: int, ticket: bytes) -> socket.socket | None:
        """A socket on which a relay forwards the bytes of a connection; None if the gRPC call must carry them.

        Args:
            relay: the relay.
            port: ticket port that the relay named; 0 for none.
            ticket: ticket of the connection.
        """
        now_s = time.monotonic()
        again_s, waited_s = self._unreached.get(relay, (now_s, 0.0))
        if is_service_port(port) or len(ticket) != TICKET_BYTES or again_s > now_s:
            return None
        host = self._endpoint_of(relay).rpartition(":")[0].strip("[]")
        try:
            async with asyncio.timeout(SOCKET_S):
                shown = await show_ticket(host, port, ticket)
            self._unreached.pop(relay, None)
            return shown
        except TimeoutError:  # probably a firewall: without a pause each connection would wait for it
            wait_s = min(AGAIN_AT_MOST_S, max(AGAIN_S, 2 * waited_s))
            self._unreached[relay] = now_s + wait_s, wait_s
        except (OSError, ValueError) as error:
            logger.debug("a relay gave no socket", extra={"relay": short(relay.node_id), "error": str(error)})
        return None

    async def close(self) -> None:
        """Ends every session."""
        sessions = [session for own in self._open.values() for session in own]
        self._open.clear()
        await asyncio.gather(*(session.channel.close() for session in sessions))


class RelayReservation:
    """Our reservation at a relay: connects callers of the relay to our own server.

    Args:
        sessions: sessions with relays.
        relay: holder of the reservation.
        own_server: host:port of our server.
    """

    def __init__(self, sessions: RelaySessions, relay: PeerAddress, own_server: str) -> None:
        self._sessions, self.relay = sessions, relay
        self.endpoint = relayed_endpoint(relay.endpoint, relay.node_id)
        host, _, port = own_server.rpartition(":")
        is_local = is_wildcard(own_server) or host.startswith("127.")
        self._server = ("127.0.0.1" if is_local else host.strip("[]"), int(port))
        # Each subnet of callers at each relay gets its own loopback address, so the server's bounds by address hold.
        self._has_sources = is_local and has_whole_loopback()
        self._tasks: set[asyncio.Task[None]] = set()
        self.held = asyncio.Event()  # set once the relay confirmed it

    async def hold(self) -> None:
        """Holds the reservation and accepts connections. Raises Unavailable when the relay refuses or ends it."""
        what = f"reservation at {short(self.relay.node_id)}"
        tickets, port = TokenBucket(MOST_TICKETS_PER_S, MOST_TICKETS_BURST, time.monotonic()), 0
        try:
            async with self._sessions.call(self.relay) as (stub, metadata):
                call = stub.Reserve(pb.ReserveRequest(), metadata=metadata)
                try:
                    with calling(what, Unauthenticated):
                        async for response in call:
                            if not tickets.try_take(time.monotonic()):
                                raise Unavailable(f"{what}: more than {MOST_TICKETS_PER_S:.0f} tickets in a second")
                            port = port or response.port
                            self._take(response.ticket, response.origin, port)
                finally:
                    call.cancel()
                raise Unavailable(f"{what}: the relay ended it")
        finally:
            self.held.clear()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, ticket: bytes, origin: bytes, port: int) -> None:
        self.held.set()
        if len(ticket) != TICKET_BYTES or len(origin) > ORIGIN_BYTES or len(self._tasks) >= MAX_TAKEN:
            return
        task = asyncio.ensure_future(self._lead_in(ticket, origin, port))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lead_in(self, ticket: bytes, origin: bytes, port: int) -> None:
        source = _loopback_of(self.relay.node_id, origin) if self._has_sources else ""
        local: socket.socket | None = None
        try:
            async with asyncio.timeout(LOCAL_DIAL_S):
                local = await dial(*self._server, source)
            remote = await self._sessions.socket_to(self.relay, port, ticket)
            if remote is None:
                await self._accept(ticket, local)
            else:
                await splice(local, remote, other_idle_s=IDLE_S)
        except (Unavailable, NotHeld, OSError, TimeoutError) as error:
            logger.debug("relayed connection ended", extra={"error": str(error)})
        finally:
            if local is not None:
                local.close()

    async def _accept(self, ticket: bytes, local: socket.socket) -> None:
        async with self._sessions.call(self.relay) as (stub, metadata):
            call = stub.Accept(metadata=metadata)
            try:
                with calling(f"connection taken at {short(self.relay.node_id)}", NotHeld, Unauthenticated):
                    async with asyncio.timeout(LOCAL_DIAL_S):  # as in `_until_taken`
                        await call.write(pb.AcceptRequest(ticket=ticket))
                    await pump(call, pb.AcceptRequest, local, IDLE_S, call.done_writing)
            finally:
                call.cancel()


def _loopback_of(relay_id: NodeId, origin: bytes) -> str:
    """An address in 127/8 for callers of one origin behind a relay.

    A relay gets at most 254 addresses, whatever origins it claims, and none in 127.0.x.x, where other programs listen.
    """
    first, second = hashlib.sha256(relay_id.encode()).digest()[:2]
    last = hashlib.sha256(origin).digest()[0]
    return f"127.{1 + first % 254}.{second}.{1 + last % 254}"
