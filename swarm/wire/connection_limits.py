"""Connection limits of a gRPC server: bounds by address, subnet and node; connections without a proof in time are cut.

gRPC has no hook for accepted connections, and a proxy would copy every byte of weights once more. So a thread lists
this process's sockets several times a second and shuts down those over the bounds; gRPC sees their connections end.
Invariant: shares are fair by subnet, then by address, so that many connections of one party never displace the few
connections of another. Subnets that proved an identity before have their own places for unproven connections.
"""

import contextlib
import functools
import ipaddress
import logging
import math
import os
import socket
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from swarm.addresses import subnet_of
from swarm.flow import BoundedTable
from swarm.open_files import DescriptorPin, open_descriptors
from swarm.trust_policy import ConnectionBounds
from swarm.types import NodeId

logger = logging.getLogger(__name__)

MAX_KNOWN_SUBNETS: Final = 4096
MAX_WAITING: Final = 8192  # messages from the event loop to the thread; beyond it the oldest is dropped
_MANY: Final = 32  # above this number of connections, sockets are listed every _EVERY_S_OF_MANY
_EVERY_S: Final = 0.5
_EVERY_S_OF_MANY: Final = 0.1
_REPORT_EVERY_S: Final = 10.0
_WILDCARD_HOSTS: Final = ("", "0.0.0.0", "::")

PeerKey = tuple[str, int]  # host and port of the other end


@dataclass(slots=True)
class Connection:
    """One accepted connection."""

    host: str
    port: int
    subnet: str
    since_s: float  # monotonic, when it was first seen
    descriptor: int = -1
    inode: int = 0  # of the socket, since descriptors are reused
    node_id: NodeId | None = None  # proven identity


class ConnectionLimiter:
    """Cuts the connections of one server that exceed its bounds."""

    def __init__(self, bounds: ConnectionBounds, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._monotonic_s = monotonic_s
        self._local: tuple[str, int] = ("", 0)
        self._sockets: dict[tuple[int, int], Connection | None] = {}  # by descriptor and inode; None: not ours
        self._proofs: deque[tuple[PeerKey, NodeId]] = deque(maxlen=MAX_WAITING)  # from the event loop to the thread
        self._proven: dict[PeerKey, NodeId] = {}
        self._known = BoundedTable[str, None](MAX_KNOWN_SUBNETS)  # subnets that proved an identity, the newest last
        self._open: dict[PeerKey, Connection] = {}  # at the last look; replaced, never changed
        self._cut: Counter[str] = Counter()  # by reason, since the last report
        self._reported_s = 0.0
        self._warned_s = -math.inf
        self._is_blind = True  # no look yet, or the last one failed
        self._pin: DescriptorPin | None = None
        self._condemned: deque[PeerKey] = deque(maxlen=MAX_WAITING)  # from the event loop to the thread
        self._is_called = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int, share: float = 1.0) -> None:
        """Starts the thread that watches the connections of a server.

        Args:
            host: host that the server listens on; a name or a wildcard matches every address.
            port: port that the server listens on.
            share: factor of the bounds, 0 to 1, for a low limit of open files; see `ConnectionBounds.scaled`.
        """
        self._bounds = self._bounds.scaled(share)
        # A name or wildcard may stand for several addresses: then only the port is compared.
        plain = _plain_host(host)
        self._local = ("" if plain in _WILDCARD_HOSTS else plain, port)
        self._pin = DescriptorPin()
        self._thread = threading.Thread(target=self._run, name=f"connections of {port}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread (blocking)."""
        self._is_stopped = True
        self._is_called.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_blind = True
        if self._pin is not None:
            self._pin.close()
            self._pin = None

    def prove(self, peer: str, node_id: NodeId) -> None:
        """Records the proven identity of the node on a connection; `peer` is in gRPC's form."""
        self._proofs.append((peer_key(peer), node_id))

    def is_open(self, peer: str) -> bool:
        """False if the last `look` found the connection closed; True also if that look failed, or before the first."""
        return self._is_blind or peer_key(peer) in self._open

    def cut(self, peer: str) -> None:
        """Condemns a connection: the next `look` cuts it if it is open."""
        self._condemned.append(peer_key(peer))
        self._is_called.set()

    def _run(self) -> None:
        while not self._is_stopped:
            self._is_called.wait(_EVERY_S_OF_MANY if len(self._open) > _MANY else _EVERY_S)
            self._is_called.clear()
            try:
                self.look()
            except Exception:  # task boundary: without this thread nothing is cut any more
                self._is_blind = True
                now_s = self._monotonic_s()
                if now_s - self._warned_s >= _REPORT_EVERY_S:
                    self._warned_s = now_s
                    logger.exception("the connections could not be looked at")

    def look(self) -> int:
        """Lists all sockets once; cuts connections that are condemned or exceed a bound, and returns their number."""
        now_s = self._monotonic_s()
        connections = self._find(now_s)
        self._take_proofs(connections)
        excess = find_excess(connections, self._bounds, self._known, now_s)
        while self._condemned:
            connection = self._open.get(self._condemned.popleft())
            if connection is not None:
                excess.append((connection, "called on after refusals"))
        for connection, reason in excess:
            self._shut_down(connection)
            self._cut[reason] += 1
        if self._cut and now_s - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now_s
            logger.warning("connections cut", extra={"reasons": dict(self._cut), "open": len(connections)})
            self._cut.clear()
        return len(excess)

    def _find(self, now_s: float) -> list[Connection]:
        sockets: dict[tuple[int, int], Connection | None] = {}
        for descriptor in open_descriptors():
            try:
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    key = (descriptor, status.st_ino)
                    sockets[key] = self._sockets[key] if key in self._sockets else self._accepted(*key, now_s)
            except OSError:  # it was closed
                continue
        self._sockets = sockets
        connections = [connection for connection in sockets.values() if connection is not None]
        self._open = {(connection.host, connection.port): connection for connection in connections}
        self._is_blind = False
        return connections

    def _accepted(self, descriptor: int, inode: int, now_s: float) -> Connection | None:
        """The connection behind a new socket; None if our server did not accept it.

        Raises:
            OSError: the socket was closed in between, or cannot be examined now.
        """
        assert self._pin is not None
        with self._pin.held(descriptor) as held:
            if held.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            try:
                local, remote = held.getsockname(), held.getpeername()
            except OSError:  # a listening socket has no peer
                return None
            inode = os.fstat(held.fileno()).st_ino
        host, port = self._local
        if local[1] != port or (host and _plain_host(local[0]) != host):
            return None
        remote_host = _plain_host(remote[0])
        return Connection(
            host=remote_host,
            port=remote[1],
            subnet=subnet_of(remote_host),
            since_s=now_s,
            descriptor=descriptor,
            inode=inode,
        )

    def _shut_down(self, connection: Connection) -> None:
        """Ends a connection for both sides, unless its descriptor now belongs to another socket."""
        assert self._pin is not None
        with contextlib.suppress(OSError), self._pin.held(connection.descriptor) as held:  # it may have ended
            if os.fstat(held.fileno()).st_ino == connection.inode:
                held.shutdown(socket.SHUT_RDWR)

    def _take_proofs(self, connections: Sequence[Connection]) -> None:
        news: dict[PeerKey, NodeId] = {}
        while self._proofs:
            peer, node_id = self._proofs.popleft()
            news[peer] = node_id
        # A proof may be of a connection that this look has not seen yet: it is kept for one more look.
        self._proven = {peer: node for peer, node in self._proven.items() if peer in self._open} | news
        for connection in connections:
            connection.node_id = self._proven.get((connection.host, connection.port))
            if (connection.host, connection.port) in news:
                self._known[connection.subnet] = None


def find_excess(
    connections: Sequence[Connection], bounds: ConnectionBounds, known: Iterable[str], now_s: float
) -> list[tuple[Connection, str]]:
    """The connections that exceed a bound, each with a reason. `known`: subnets that proved an identity before."""
    known = set(known)
    excess: list[tuple[Connection, str]] = []
    strangers: list[Connection] = []
    acquainted: list[Connection] = []
    proven: dict[NodeId, list[Connection]] = {}
    for connection in connections:
        if connection.node_id is not None:
            proven.setdefault(connection.node_id, []).append(connection)
        elif now_s - connection.since_s > bounds.unproven_s:
            excess.append((connection, "proved nothing in time"))
        else:
            (acquainted if connection.subnet in known else strangers).append(connection)
    held: list[Connection] = []
    for own in proven.values():
        own.sort(key=lambda connection: -connection.since_s)  # the newest stay: older ones are likely broken
        held += own[: bounds.proven_per_node]
        excess += [(connection, "of one node") for connection in own[bounds.proven_per_node :]]
    # Of unproven connections the newest stay, of proven ones the oldest: newcomers get a chance, and what works
    # continues.
    for group, total in ((strangers, bounds.unproven_of_strangers), (acquainted, bounds.unproven_of_known)):
        group.sort(key=lambda connection: -connection.since_s)
        cut = over_fair_share(group, total, bounds.unproven_per_subnet, bounds.unproven_per_address)
        excess += [(connection, "unproven") for connection in cut]
    held.sort(key=lambda connection: connection.since_s)
    cut = over_fair_share(held, bounds.proven, bounds.proven_per_subnet, bounds.proven_per_subnet)
    return excess + [(connection, "proven") for connection in cut]


def over_fair_share(
    connections: Sequence[Connection], total: int, per_subnet: int, per_address: int
) -> list[Connection]:
    """The connections to cut so that at most `total` stay, in equal shares of subnets, then of addresses.

    Args:
        connections: the connections, in the order in which they are kept.
        per_subnet, per_address: bounds that hold even while places are free.
    """
    subnets: dict[str, dict[str, list[Connection]]] = {}
    for connection in connections:
        subnets.setdefault(connection.subnet, {}).setdefault(connection.host, []).append(connection)
    sizes = [sum(map(len, addresses.values())) for addresses in subnets.values()]
    share = max(1, min(per_subnet, fair_level(sizes, total)))
    kept: set[int] = set()
    for addresses in subnets.values():
        level = max(1, min(per_address, fair_level([len(own) for own in addresses.values()], share)))
        chosen = [connection for own in addresses.values() for connection in own[:level]]
        kept.update(id(connection) for connection in chosen[:share])
    staying = [connection for connection in connections if id(connection) in kept][:total]
    kept = {id(connection) for connection in staying}
    return [connection for connection in connections if id(connection) not in kept]


def fair_level(sizes: Iterable[int], total: int) -> int:
    """The largest level with sum of min(size, level) <= total; the largest size if all fit."""
    rest, ordered = total, sorted(sizes)
    for index, size in enumerate(ordered):
        num_left = len(ordered) - index
        if size * num_left > rest:
            return rest // num_left
        rest -= size
    return ordered[-1] if ordered else 0


def peer_key(peer: str) -> PeerKey:
    """Host and port of a peer in gRPC's form: "ipv6:%5B::1%5D:4001" is ("::1", 4001)."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain_host(host), int(port) if port.isdecimal() else 0


def peer_subnet(peer: str) -> str:
    """Subnet of a peer in gRPC's form."""
    return subnet_of(peer_key(peer)[0])


@functools.lru_cache(maxsize=MAX_KNOWN_SUBNETS)
def _plain_host(host: str) -> str:
    """Canonical form of an IP address: no brackets or zone, and IPv4 for IPv4 in IPv6; "" for a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
