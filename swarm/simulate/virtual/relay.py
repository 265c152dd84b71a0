"""Relays of a virtual swarm: reservations, dial-backs and connections, decided by the product's own table.

Invariant: open lines count the load of a relay here, independently of the tables that decide.
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

RESERVE_BYTES: Final = 512  # of a call that asks for a reservation, or tells of a connection
# Of a node that looks at its own certificate through a relay: a TLS greeting has 1,187 bytes (measured), twice.
CHECK_BYTES: Final = 2 * 1187 + RESERVE_BYTES
THROTTLED_BYTES_PER_S: Final = 2_000.0
UNHEARD_S: Final = 2 * RELAY_PING_S  # after the last byte of a relayed connection its end is known


class MemoryRelay:
    """Relay at one live node, or at the coordinator, for nodes that cannot be dialled.

    Args:
        network: that it is in.
        node_id: its own.
        clock: for rates.
        table: decides.
        is_open: whether it relays now.
        faults: of this relay.
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
        """Free reservations, as the node's advert states them."""
        return self.table.num_free if self._is_open() else 0

    def require_open(self) -> None:
        """Raises Unavailable where it does not relay."""
        if not self._is_open():
            raise Unavailable("this node does not relay")

    def has(self, vice: RelayVice) -> bool:
        """True while it misbehaves in that way."""
        now_s = self._network.now_s()
        return any(fault.vice is vice and fault.start_s <= now_s < fault.end_s for fault in self.faults)

    def has_session(self, caller: NodeId) -> bool:
        """True where a caller has a connection to it that the next call shares."""
        return caller in self.held or any(line.client == caller for line in self.lines)

    def room(self, size_bytes: int, caller: NodeId) -> asyncio.Future[None] | None:
        """Future that a message of a caller's connection waits for; None where it passes at once."""
        budget = self._throttled if self.has(RelayVice.THROTTLES) else self._budget
        return budget.ask(size_bytes, caller, caller)

    def count_ask(self, caller: NodeId) -> None:
        """A caller asks for a reservation or a connection; each has a subnet of its own. Raises Unavailable."""
        self.table.count_ask(caller, self._clock.monotonic_s())

    def check_way(self, caller: NodeId, node_id: NodeId) -> None:
        """A caller asks for a connection to a node. Raises Unavailable where there is no way there."""
        self.count_ask(caller)
        try:
            self.table.way_to(node_id, self._clock.monotonic_s())
        except NotHeld as error:
            raise Unavailable(str(error)) from None

    def dial_back(self, caller: NodeId) -> DialBack:
        """Report of a try to dial the caller. Raises Unavailable."""
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
