"""Reservations and connections of a relay: admission as pure bookkeeping, shared with the relays of virtual swarms.

Invariant: both are bounded by node, by subnet and in all. If a bound permits a replacement, a node of lower standing
loses its entry, or else the subnet with most entries, if it has at least two more than the newcomer's subnet.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from swarm.addresses import HTTPS_PORT, LEAST_PORT, is_service_port
from swarm.errors import NotHeld, TooLarge, Unavailable
from swarm.fairness import FairTable
from swarm.flow import BoundedTable, RateLimiter, Signal
from swarm.types import NodeId, short

DIAL_BACKS_PER_S: Final = 1 / 20  # of one subnet
DIAL_BACKS_BURST: Final = 8.0
DIALLED_S: Final = 1500.0  # validity of a dial-back: nodes ask every 600 s, and an address may change hands
MAX_DIALLED: Final = 4096
MAX_SUBNETS: Final = 4096
# Tickets sent to a node; further ones wait. A node leaves a relay that sends far more (`relay_client.py`), and callers
# of a few subnets together ask for more.
TICKETS_PER_S: Final = 24.0
TICKETS_BURST: Final = 192.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayLimits:
    """Bounds on the cost of relaying for this node."""

    reservations: int = 128
    reservations_per_subnet: int = 32
    connections: int = 512
    connections_per_node: int = 28  # of the 42 calls that a node with a reservation may have; others are its own
    connections_per_caller: int = 32
    connections_per_subnet: int = 128  # of callers
    # Requests of one subnet for reservations and connections, which cost the requested node, too; two per session.
    asks_per_s: float = 16.0
    asks_burst: float = 256.0
    bytes_per_s: int = 8 * 2**20  # of all connections, both directions
    burst_bytes: int = 4 * 2**20
    idle_s: float = 90.0  # a connection without a byte ends; both ends send something every few seconds


@dataclass(frozen=True, slots=True)
class Ticket:
    """Offer of a connection to the requested node."""

    ticket: bytes
    origin: bytes  # pseudonym of the caller's subnet


@dataclass(eq=False, slots=True)
class HeldReservation:
    """A node's reservation at this relay, with the tickets for it."""

    node_id: NodeId
    subnet: str
    end: Callable[[], None]  # called when another reservation takes its place
    waiting: dict[bytes, Ticket] = field(default_factory=dict[bytes, Ticket])  # tickets to send, oldest first
    changed: Signal = field(default_factory=Signal)  # fires when a ticket was added
    num_tickets: int = 0  # sent and not shown yet
    advert: bytes = b""  # announced here: look-ups here find it even if the directory is full

    def ask(self, ticket: Ticket) -> None:
        """Queues a ticket for the node."""
        self.waiting[ticket.ticket] = ticket
        self.changed.fire()

    def count_shown(self) -> bool:
        """Counts a ticket that the node showed; False if none was outstanding."""
        is_expected = self.num_tickets > 0
        self.num_tickets -= is_expected
        return is_expected

    async def next_ticket(self) -> Ticket:
        """Waits for a ticket, and returns the one that has waited longest."""
        await self.changed.until(lambda: bool(self.waiting))
        self.num_tickets += 1
        return self.waiting.pop(next(iter(self.waiting)))


@dataclass(eq=False, slots=True)
class RelayedConnection:
    """An open connection through this relay."""

    caller: NodeId
    subnet: str  # of the caller
    node_id: NodeId  # the far end
    end: Callable[[], None]  # called when another connection takes its place


class ReservationTable:
    """The reservations and open connections of one relay, and nodes that were dialled successfully.

    Args:
        limits: bounds of reservations, connections and requests.
        standing: rank of a node; reservations and connections of lower rank make room first.

    Example:
        reservation = table.add(node_id, subnet, end=lambda: ...)
        with table.connection(node_id, caller, subnet_of_caller, end=lambda: ...):
            ...
        table.remove(reservation)
    """

    def __init__(self, limits: RelayLimits, standing: Callable[[NodeId], int] = lambda node_id: 0) -> None:
        self.limits, self._standing = limits, standing
        self._held: dict[NodeId, HeldReservation] = {}
        self._held_by = FairTable[str, HeldReservation]()  # by subnet
        self._connections = FairTable[str, RelayedConnection]()  # by subnet of the caller
        self._connections_to: dict[NodeId, FairTable[str, RelayedConnection]] = {}
        self._num_of_caller = Counter[NodeId]()
        self._dialled = BoundedTable[NodeId, tuple[str, float]](MAX_DIALLED)  # host:port where a node proved its key
        self._dial_backs = RateLimiter[str](DIAL_BACKS_PER_S, DIAL_BACKS_BURST, MAX_SUBNETS)
        self._asks = RateLimiter[str](limits.asks_per_s, limits.asks_burst, MAX_SUBNETS)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_free(self) -> int:
        """Number of free reservations."""
        return max(0, self.limits.reservations - len(self))

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def num_connections_to(self, node_id: NodeId) -> int:
        """Number of open connections to one node."""
        return len(self._connections_to.get(node_id, ()))

    def count_ask(self, subnet: str, now_s: float) -> None:
        """Counts a request for a reservation or connection. Raises Unavailable above the subnet's `asks_per_s`."""
        if not self._asks.spend(subnet, now_s):
            raise Unavailable(f"more than {self.limits.asks_per_s:.0f} relayed connections in a second; slow down")

    # --- nodes that were dialled ----------------------------------------------------------------------

    def count_dial_back(self, subnet: str, now_s: float) -> None:
        """Counts a dial-back for a caller of a subnet. Raises Unavailable above the subnet's DIAL_BACKS_PER_S."""
        if not self._dial_backs.spend(subnet, now_s):
            raise Unavailable(f"more than {60 * DIAL_BACKS_PER_S:.0f} dial-backs in a minute; ask another node")

    def note_dialled(self, node_id: NodeId, endpoint: str, now_s: float) -> None:
        """Records the host:port at which a node proved its key; "" removes the record of a node that did not."""
        if endpoint:
            self._dialled[node_id] = endpoint, now_s
        else:
            self._dialled.pop(node_id, None)

    def way_to(self, node_id: NodeId, now_s: float) -> HeldReservation | str:
        """A node's reservation, or the host:port where it was dialled within DIALLED_S. Raises NotHeld if neither."""
        reservation, dialled = self._held.get(node_id), self._dialled.get(node_id)
        if reservation is not None:
            return reservation
        if dialled is None or dialled[1] + DIALLED_S < now_s:
            raise NotHeld(f"{short(node_id)} holds no reservation here")
        return dialled[0]

    # --- reservations ------------------------------------------------------------------------------

    def get(self, node_id: NodeId) -> HeldReservation | None:
        """The reservation of a node; None without one."""
        return self._held.get(node_id)

    def adverts(self) -> list[bytes]:
        """Adverts that holders of reservations announced here."""
        return [each.advert for each in self._held.values() if each.advert]

    def add(self, node_id: NodeId, subnet: str, end: Callable[[], None]) -> HeldReservation:
        """Adds a reservation; a newer one of the same node ends the older one. Raises Unavailable without room."""
        if not self.limits.reservations:
            raise Unavailable("this node does not relay")
        if node_id in self._held:
            self._end(self._held[node_id])
        elif len(self._held_by.of(subnet)) >= self.limits.reservations_per_subnet:
            self._make_room(node_id, subnet, list(self._held_by.of(subnet)))
        elif len(self) >= self.limits.reservations:
            self._make_room(node_id, subnet, list(self._held.values()))
        reservation = self._held[node_id] = HeldReservation(node_id, subnet, end)
        self._held_by.add(subnet, reservation)
        return reservation

    def remove(self, reservation: HeldReservation) -> None:
        """Frees a reservation; idempotent."""
        if self._held_by.remove(reservation.subnet, reservation):
            del self._held[reservation.node_id]

    def _make_room(self, node_id: NodeId, subnet: str, reservations: list[HeldReservation]) -> None:
        """Ends the newest reservation of lower standing, or of the subnet with most. Raises Unavailable if none."""
        standing = self._standing(node_id)
        lower = [each for each in reservations if self._standing(each.node_id) < standing]
        if lower:
            self._end(lower[-1])
            return
        most = self._held_by.longest(beside=subnet)
        if most is None or len(reservations) < len(self):
            count = len(reservations)
            raise Unavailable(f"{count} reservations are taken, of your network or of all; try another relay")
        self._end(self._held_by.newest(most))

    def _end(self, reservation: HeldReservation) -> None:
        reservation.end()
        self.remove(reservation)

    # --- connections -------------------------------------------------------------------------------

    @contextmanager
    def connection(
        self, node_id: NodeId, caller: NodeId, subnet: str, end: Callable[[], None]
    ) -> Generator[RelayedConnection]:
        """Counts a connection while the block runs. Raises Unavailable at a bound.

        Args:
            node_id: the far end.
            caller: the near end.
            subnet: subnet of the caller.
            end: called when another connection takes this one's place.
        """
        limits, connection = self.limits, RelayedConnection(caller, subnet, node_id, end)
        if self._num_of_caller[caller] >= limits.connections_per_caller:
            raise Unavailable(f"{limits.connections_per_caller} connections of yours are open here")
        if len(self._connections.of(subnet)) >= limits.connections_per_subnet:
            raise Unavailable(f"{limits.connections_per_subnet} connections of your network are open here")
        if self.num_connections_to(node_id) >= limits.connections_per_node:
            self._replace(connection, self._connections_to[node_id], "to this node")
        if len(self._connections) >= limits.connections:
            self._replace(connection, self._connections, "in all")
        # only now: a replaced connection may have been the last one to this node
        self._connections.add(subnet, connection)
        self._connections_to.setdefault(node_id, FairTable()).add(subnet, connection)
        self._num_of_caller[caller] += 1
        try:
            yield connection
        finally:
            self._forget(connection)

    def _replace(self, newcomer: RelayedConnection, connections: FairTable[str, RelayedConnection], which: str) -> None:
        """Ends a connection of a caller of lower standing, or of the subnet with most. Raises Unavailable if none."""
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
        found.end()
        self._forget(found)

    def _forget(self, connection: RelayedConnection) -> None:
        if self._connections.remove(connection.subnet, connection):
            own = self._connections_to[connection.node_id]
            own.remove(connection.subnet, connection)
            if not own:
                del self._connections_to[connection.node_id]
            self._num_of_caller[connection.caller] -= 1
            if not self._num_of_caller[connection.caller]:
                del self._num_of_caller[connection.caller]


def check_port(port: int) -> None:
    """Raises TooLarge for a port that is never dialled back."""
    if is_service_port(port):
        raise TooLarge(f"port {port}, expected {HTTPS_PORT}, or {LEAST_PORT} to 65535")
