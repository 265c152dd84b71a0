"""Relays of a virtual swarm: reservations, dial-backs and connections, decided by the real `ReservationTable`.

Invariant: the open lines recorded here count the load of a relay, independently of the table that decides.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from swarm.clock import Clock
from swarm.errors import NotHeld, Unavailable
from swarm.interfaces import DialBack
from swarm.relay.byte_budget import ByteBudget
from swarm.relay.relaying_transport import RELAY_PING_S
from swarm.relay.reservation_table import ReservationTable
from swarm.simulate.virtual.direct_network import DirectNetwork, Line
from swarm.simulate.virtual.faults import RelayFault, RelayVice
from swarm.types import NodeId

RESERVE_BYTES: Final = 512  # of a call that asks for a reservation, or announces a connection
# Of a node that looks at its own certificate through a relay: a TLS greeting has 1,187 bytes (measured), twice.
CHECK_BYTES: Final = 2 * 1187 + RESERVE_BYTES
THROTTLED_BYTES_PER_S: Final = 2_000.0
UNHEARD_S: Final = 2 * RELAY_PING_S  # of silence, after which an end of a relayed connection gives up


class MemoryRelay:
    """Relay at one live node, or at the coordinator, for nodes that cannot be dialled.

    Args:
        network: network of the relay.
        node_id: id of the relay's node.
        clock: clock of the rate limits.
        table: decides on reservations and connections.
        is_open: returns True while the node relays.
        faults: faults of this relay.
    """

    def __init__(
        self,
        network: DirectNetwork,
        node_id: NodeId,
        clock: Clock,
        table: ReservationTable,
        is_open: Callable[[], bool],
        faults: tuple[RelayFault, ...] = (),
    ) -> None:
        self._network, self.node_id, self._clock = network, node_id, clock
        self.table, self._is_open, self.faults = table, is_open, faults
        self._budget = ByteBudget(clock, table.limits.bytes_per_s, table.limits.burst_bytes)
        self._throttled = ByteBudget(clock, THROTTLED_BYTES_PER_S, THROTTLED_BYTES_PER_S)
        self.held: dict[NodeId, Line] = {}  # open lines of those who hold a reservation
        self.lines: dict[Line, None] = {}

    @property
    def free_reservations(self) -> int:
        """Number of free reservations, as the node's advert states it; 0 while the node does not relay."""
        return self.table.num_free if self._is_open() else 0

    def require_open(self) -> None:
        """Raises Unavailable if the node does not relay now."""
        if not self._is_open():
            raise Unavailable("this node does not relay")

    def has(self, vice: RelayVice) -> bool:
        """True while a fault of the plan makes the relay misbehave in this way."""
        now_s = self._network.now_s()
        return any(fault.vice is vice and fault.start_s <= now_s < fault.end_s for fault in self.faults)

    def has_session(self, caller: NodeId) -> bool:
        """True if the caller has a connection to the relay, which the caller's next call shares."""
        return caller in self.held or any(line.client == caller for line in self.lines)

    def room(self, size_bytes: int, caller: NodeId) -> asyncio.Future[None] | None:
        """Future to await before a message of the caller's connection may pass; None if it may pass at once."""
        budget = self._throttled if self.has(RelayVice.THROTTLES) else self._budget
        return budget.ask(size_bytes, caller, caller)

    def count_ask(self, caller: NodeId) -> None:
        """Counts a request for a reservation or connection, by caller. Raises Unavailable if there are too many."""
        self.table.count_ask(caller, self._clock.monotonic_s())

    def check_way(self, caller: NodeId, node_id: NodeId) -> None:
        """Counts a request for a connection to a node. Raises Unavailable if it is refused or no way leads there."""
        self.count_ask(caller)
        try:
            self.table.way_to(node_id, self._clock.monotonic_s())
        except NotHeld as error:
            raise Unavailable(str(error)) from None

    def dial_back(self, caller: NodeId) -> DialBack:
        """Report of an attempt to dial the caller, reversed if the relay lies. Raises Unavailable for a refusal."""
        self.require_open()
        self.table.count_dial_back(caller, self._clock.monotonic_s())
        is_reached = self._network.is_dialable(caller) and not self._network.is_cut(self.node_id, caller)
        endpoint = self._network.endpoint_of(caller)
        self.table.note_dialled(caller, endpoint if is_reached else "", self._clock.monotonic_s())
        if self.has(RelayVice.LIES):
            self._network.note("lie", self.node_id, caller)
            self._network.lied_to.add(caller)
            is_reached = not is_reached
        host = endpoint.rpartition(":")[0]
        return DialBack(host=host, is_reached=is_reached, detail="" if is_reached else "no answer")
