"""Relays of a virtual swarm: reservations, dial-backs and connections, decided by the product's own table.

Invariant: what a relay holds is counted here by the lines that are open, apart from the tables that decide.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from swarm.addresses import relayed_endpoint
from swarm.clock import Clock
from swarm.errors import NotHeld, Unavailable
from swarm.exchange.grpc_transport import RELAY_PING_S, ROUTER_PING_S
from swarm.interfaces import DialBack, PeerAddress
from swarm.relay.byte_budget import ByteBudget
from swarm.relay.reservation_table import ReservationTable
from swarm.simulate.virtual.faults import RelayFault, RelayVice
from swarm.simulate.virtual.network import Line, MemoryNetwork
from swarm.types import NodeId

RESERVE_BYTES: Final = 512  # of a call that asks for a reservation, or tells of a connection
# Of a node that looks at its own certificate through a relay: a TLS greeting has 1,187 bytes (measured), twice.
CHECK_BYTES: Final = 2 * 1187 + RESERVE_BYTES
THROTTLED_BYTES_PER_S: Final = 2_000.0
UNHEARD_S: Final = 2 * RELAY_PING_S  # after the last byte of a relayed connection its end is known


class MemoryRelay:
    """What one live node, or the coordinator, does for nodes that cannot be dialled.

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
        network: MemoryNetwork,
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
        self.lines: dict[RelayedLine, None] = {}

    @property
    def free_reservations(self) -> int:
        """As the advert says them."""
        return self.table.num_free if self._is_open() else 0

    def require_open(self) -> None:
        """Raises Unavailable where it does not relay."""
        if not self._is_open():
            raise Unavailable("this node does not relay")

    def has(self, vice: RelayVice) -> bool:
        """Whether that is wrong with it now."""
        now_s = self._network.now_s()
        return any(fault.vice is vice and fault.start_s <= now_s < fault.end_s for fault in self.faults)

    def has_session(self, caller: NodeId) -> bool:
        """Whether a caller has a connection with it that the next call shares."""
        return caller in self.held or any(line.client == caller for line in self.lines)

    def room(self, size_bytes: int, caller: NodeId) -> asyncio.Future[None] | None:
        """What a message of a caller's connection waits for; None where it passes at once."""
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
        """Whether the caller can be dialled. Raises Unavailable."""
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


class MemoryReservation:
    """`swarm.interfaces.Reservation` at a MemoryRelay."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId, relay: PeerAddress) -> None:
        self._network, self._node_id, self._relay = network, node_id, relay
        self.endpoint = relayed_endpoint(relay.endpoint, relay.node_id)
        self.held = asyncio.Event()

    async def hold(self) -> None:
        """Holds the reservation until it is lost. Raises Unavailable."""
        network, node_id = self._network, self._node_id
        relay = await network.reach_relay(node_id, self._relay)
        relay.require_open()
        relay.count_ask(node_id)
        line = Line(network, node_id, relay.node_id, ROUTER_PING_S)
        reservation = None
        try:
            reservation = relay.table.add(node_id, node_id, lambda: line.cut("the reservation is another's now"))
            network.count("reserve", 2 * RESERVE_BYTES)
            await line.wait(network.transit_s(relay.node_id, RESERVE_BYTES))
            relay.held[node_id] = line
            network.note("reserve", relay.node_id, node_id)
            network.check_relay(relay)
            self.held.set()
            await line.until_cut()
        finally:
            self.held.clear()
            if reservation is not None:
                relay.table.remove(reservation)
            if relay.held.get(node_id) is line:
                del relay.held[node_id]
                network.lost_s[node_id, self.endpoint] = network.now_s()
                for through in [each for each in relay.lines if each.server == node_id]:
                    through.cut("the reservation was lost")
            line.cut("the reservation is given up")


class RelayedLine(Line):
    """A connection through a relay; it ends with either of its halves, and counts at the relay until then."""

    def __init__(self, network: MemoryNetwork, client: NodeId, server: NodeId, relay: MemoryRelay) -> None:
        self.relay = relay
        self._counted = ExitStack()
        self._counted.enter_context(
            relay.table.connection(server, client, client, lambda: self.cut("it made room for another one"))
        )
        super().__init__(network, client, server, RELAY_PING_S, via=relay.node_id)
        relay.lines[self] = None
        self._carriers = [relay.held[end] for end in (client, server) if end in relay.held]
        for carrier in self._carriers:
            carrier.carry(1)
        now_s = network.now_s()
        self._timers = [
            self._loop.call_later(fault.start_s - now_s + UNHEARD_S, self._end_unheard)
            for fault in relay.faults
            if fault.vice is RelayVice.WITHHOLDS and fault.start_s > now_s
        ]
        network.check_relay(relay)

    def cut(self, reason: str) -> None:
        """As of `Line`."""
        if self not in self.relay.lines:
            return
        super().cut(reason)
        del self.relay.lines[self]
        for carrier in self._carriers:
            carrier.carry(-1)
        for timer in self._timers:
            timer.cancel()
        self._counted.close()

    async def pass_on(self, size_bytes: int) -> None:
        """Waits until the relay has room for a message. Raises Unavailable as soon as the connection breaks."""
        room = self.relay.room(size_bytes, self.client)
        if room is not None:
            try:
                with self.waking(room.cancel):
                    await asyncio.wait([room])
            finally:
                room.cancel()  # who does not wait any more takes nothing
            self.check()

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """As of `Line`, by way of the relay."""
        if self.relay.has(RelayVice.WITHHOLDS):  # what does not come is noticed by who asks for a sign of life
            self._timers.append(self._loop.call_later(UNHEARD_S, self._end_unheard))
            return 2 * UNHEARD_S
        return super().transit_s(sender, size_bytes) + self._network.transit_s(self.relay.node_id, size_bytes)

    def _end_unheard(self) -> None:
        if self.relay.has(RelayVice.WITHHOLDS):
            self.cut("its far end does not answer")
