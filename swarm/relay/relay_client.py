"""A node's own dealings with relays: a reservation at one, connections through one, whether it can be dialled at all.

Invariant: whatever comes through a relay is a connection like any other: it goes to the node's own server, or to a
channel of its own, on which both ends prove their keys. Sockets, calls and tickets are bounded: a relay needs no trust.
"""

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc

from swarm.addresses import has_whole_loopback, is_service_port, is_wildcard, relayed_endpoint
from swarm.errors import NotHeld, Unauthenticated, Unavailable
from swarm.flow import BoundedTable, TokenBucket
from swarm.interfaces import DialBack, PeerAddress
from swarm.printable import printable
from swarm.relay.relay_servicer import MAX_RECORDS, ORIGIN_BYTES
from swarm.relay.reservation_table import TICKETS_BURST, TICKETS_PER_S
from swarm.relay.ticket_port import TICKET_BYTES, show_ticket
from swarm.relay.tunnel import pump, splice
from swarm.types import NodeId, short
from swarm.wire.adverts import MAX_ADVERT_BYTES, is_endpoint
from swarm.wire.grpc_errors import calling
from swarm.wire.host_names import dial
from swarm.wire.session import AuthenticatedChannel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1 import relay_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CALLS_PER_SESSION: Final = 7  # of the 8 that a coordinator takes on a connection; more would wait without a word
# A server keeps eight connections of a node and cuts the oldest beyond, on which its reservation is held. Some are
# for groups and weights of the relay's own.
SESSIONS_PER_RELAY: Final = 6
MAX_LOOKED_UP: Final = 4096  # adverts of one look-up
MAX_TAKEN: Final = 64  # connections through one reservation
# Of one reservation: a relay that tells of a third more than relays do is left.
MOST_TICKETS_PER_S: Final = TICKETS_PER_S * 4 / 3
MOST_TICKETS_BURST: Final = TICKETS_BURST * 4 / 3
LOCAL_DIAL_S: Final = 5.0
IDLE_S: Final = 100.0  # without a byte of a caller: a relay ends what is silent for 90 s
SOCKET_S: Final = 1.5  # for a relay to answer at its port of sockets
# Until one that did not is asked there again, ever longer; bytes go by its calls meanwhile.
AGAIN_S: Final = 5.0
AGAIN_AT_MOST_S: Final = 600.0
MAX_UNREACHED: Final = 1024  # relays that did not

OpenSession = Callable[[PeerAddress, float], Awaitable[AuthenticatedChannel]]


@dataclass(eq=False, slots=True)
class _Session:
    channel: AuthenticatedChannel
    num_calls: int = 0


class RelaySessions:
    """Sessions with relays, shared by the calls to each of them.

    Args:
        open_session: connects to a relay and proves who we are; raises Unavailable.
        endpoint_of: host:port by which that connects to it.
        timeout_s: of a call that is answered at once.

    Example:
        async with sessions.call(relay) as (stub, metadata):
            await stub.DialBack(request, metadata=metadata)
    """

    def __init__(self, open_session: OpenSession, endpoint_of: Callable[[PeerAddress], str], timeout_s: float) -> None:
        self._open_session, self._endpoint_of, self.timeout_s = open_session, endpoint_of, timeout_s
        # Of relays whose port did not answer: when it is asked again, and how long it is left alone.
        self._unreached = BoundedTable[PeerAddress, tuple[float, float]](MAX_UNREACHED)
        self._open: dict[PeerAddress, list[_Session]] = {}
        self._opening = WeakValueDictionary[PeerAddress, asyncio.Lock]()  # as long as anybody waits for a session

    def call(self, relay: PeerAddress) -> "_Call":
        """A context for one call to a relay: its stub and metadata. Raises Unavailable."""
        return _Call(self, relay)

    async def begin(self, relay: PeerAddress) -> _Session:
        """A session with room for one more call."""
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

    async def end(self, relay: PeerAddress, session: _Session, *, is_broken: bool) -> None:
        """A call has ended. A session that broke takes no more calls, and one without any is closed."""
        session.num_calls -= 1
        own = self._open.get(relay, [])
        if session in own and (is_broken or not session.num_calls):
            own.remove(session)
            if not own:
                del self._open[relay]
        if not session.num_calls:
            await session.channel.close()

    async def socket_to(self, relay: PeerAddress, port: int, ticket: bytes) -> socket.socket | None:
        """A socket on which a relay passes on the bytes of a connection.

        Args:
            port: that the relay named; 0: none.
            ticket: of the connection.

        Returns:
            None where it gives none: the bytes go by the call then.
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
        except TimeoutError:  # a firewall, which each connection would wait for
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


class _Call:
    def __init__(self, sessions: RelaySessions, relay: PeerAddress) -> None:
        self._sessions, self._relay = sessions, relay
        self._session: _Session | None = None

    async def __aenter__(self) -> tuple[Any, Any]:
        session = self._session = await self._sessions.begin(self._relay)
        try:
            metadata = await session.channel.metadata(self._sessions.timeout_s)
        except BaseException:
            await self._sessions.end(self._relay, session, is_broken=True)
            raise
        return pb_grpc.RelayServiceStub(session.channel.channel), metadata

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        assert self._session is not None
        # One connection of several may fail without a fault of the session: its far end went away.
        state = self._session.channel.channel.get_state()
        is_lost = isinstance(error, Unavailable) and state is not grpc.ChannelConnectivity.READY
        is_broken = is_lost or isinstance(error, Unauthenticated)
        await self._sessions.end(self._relay, self._session, is_broken=is_broken)


async def dial_back(sessions: RelaySessions, peer: PeerAddress, port: int, timeout_s: float) -> DialBack:
    """Asks a peer to dial us at the address that our call comes from. Raises Unavailable."""
    what = f"dial-back from {short(peer.node_id)}"
    async with sessions.call(peer) as (stub, metadata):
        with calling(what, Unauthenticated):
            answer = await stub.DialBack(pb.DialBackRequest(port=port), metadata=metadata, timeout=timeout_s)
    host = str(answer.host)
    if not is_endpoint(f"{host}:{port}"):
        raise Unavailable(f"{what}: {host[:60]!a} is no address")
    detail = " ".join(printable(str(answer.detail)[:200]).split())  # `swarm status` and `swarm doctor` show it
    return DialBack(host=host, is_reached=answer.is_reached, detail=detail)


async def announce_at(sessions: RelaySessions, relay: PeerAddress, advert: bytes) -> None:
    """Hands a relay our signed advert, to be put into the directory. Raises Unavailable."""
    async with sessions.call(relay) as (stub, metadata):
        with calling(f"announcement at {short(relay.node_id)}", Unauthenticated):
            await stub.Announce(pb.AnnounceRequest(advert=advert), metadata=metadata, timeout=2 * sessions.timeout_s)


async def records_at(sessions: RelaySessions, relay: PeerAddress) -> list[bytes]:
    """Signed adverts that a relay knows, which nobody checked. Raises Unavailable."""
    found: list[bytes] = []
    what = f"look-up at {short(relay.node_id)}"
    async with sessions.call(relay) as (stub, metadata):
        call = stub.Lookup(pb.LookupRequest(), metadata=metadata, timeout=2 * sessions.timeout_s)
        try:
            with calling(what, Unauthenticated):
                async for response in call:
                    _check_adverts(response.adverts, what)
                    found += response.adverts
                    if len(found) >= MAX_LOOKED_UP:
                        break
        finally:
            call.cancel()
    return found[:MAX_LOOKED_UP]


def _check_adverts(adverts: Sequence[bytes], what: str) -> None:
    """Raises Unavailable where a message is none of a directory: with what is not kept it could go on for ever."""
    longest = max(map(len, adverts), default=0)
    if not 0 < len(adverts) <= MAX_RECORDS or longest > MAX_ADVERT_BYTES:
        bound = f"expected at most {MAX_RECORDS} of {MAX_ADVERT_BYTES}, and at least one"
        raise Unavailable(f"{what}: {len(adverts)} adverts of up to {longest} bytes, {bound}; the relay is broken")


class RelayReservation:
    """Our reservation at a relay: connections that others ask for there are taken, and led to our own server.

    Args:
        sessions: with relays.
        relay: where the reservation is.
        own_server: host:port of our own server.

    Example:
        reservation = RelayReservation(sessions, relay, "0.0.0.0:7700")
        await reservation.hold()  # until it is lost
    """

    def __init__(self, sessions: RelaySessions, relay: PeerAddress, own_server: str) -> None:
        self._sessions, self.relay = sessions, relay
        self.endpoint = relayed_endpoint(relay.endpoint, relay.node_id)
        host, _, port = own_server.rpartition(":")
        is_local = is_wildcard(own_server) or host.startswith("127.")
        self._server = ("127.0.0.1" if is_local else host.strip("[]"), int(port))
        # Each subnet behind each relay has a loopback address of its own: the server's bounds by address are theirs.
        self._has_sources = is_local and has_whole_loopback()
        self._tasks: set[asyncio.Task[None]] = set()
        self.held = asyncio.Event()  # set once the relay said so

    async def hold(self) -> None:
        """Holds the reservation and takes connections until the relay ends it.

        Raises:
            Unavailable: it ended, or the relay has none for us.
        """
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
    """An address of 127/8 for callers of one origin behind a relay, which has at most 254 of them, whatever it says;
    never 127.0.x.x, where others listen."""
    first, second = hashlib.sha256(relay_id.encode()).digest()[:2]
    last = hashlib.sha256(origin).digest()[0]
    return f"127.{1 + first % 254}.{second}.{1 + last % 254}"
