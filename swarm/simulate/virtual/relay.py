"""Relays of a virtual swarm: places, dial-backs and connections through them, decided by the product's own tables.

Invariant: what a relay holds is counted here by the lines that are open, apart from the tables that decide.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from swarm.addresses import relayed_endpoint
from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.exchange.grpc_transport import RELAY_PING_S
from swarm.flow import BoundedTable
from swarm.interfaces import DialBack, PeerAddress
from swarm.relay.place_table import ByteBudget, PlaceTable
from swarm.relay.relay_servicer import MAX_DIALLED
from swarm.simulate.virtual.faults import RelayFault, RelayVice
from swarm.simulate.virtual.network import Line, MemoryNetwork
from swarm.types import NodeId

RESERVE_BYTES: Final = 512  # of a call that asks for a place, or tells of a connection
THROTTLED_BYTES_PER_S: Final = 2_000.0


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
        table: PlaceTable,
        is_open: Callable[[], bool],
        faults: tuple[RelayFault, ...] = (),
    ) -> None:
        self._network, self.node_id, self._clock = network, node_id, clock
        self.table, self._is_open, self._faults = table, is_open, faults
        self._budget = ByteBudget(clock, table.limits.bytes_per_s, table.limits.burst_bytes)
        self._throttled = ByteBudget(clock, THROTTLED_BYTES_PER_S, THROTTLED_BYTES_PER_S)
        self.held: dict[NodeId, Line] = {}  # open lines of those who hold a place
        self.lines: dict[RelayedLine, None] = {}
        self.dialled = BoundedTable[NodeId, None](MAX_DIALLED)  # who proved to be dialable to us

    @property
    def free_places(self) -> int:
        """As the advert says them."""
        return self.table.num_free if self._is_open() else 0

    def require_open(self) -> None:
        """Raises Unavailable where it does not relay."""
        if not self._is_open():
            raise Unavailable("this node does not relay")

    def has(self, vice: RelayVice) -> bool:
        """Whether that is wrong with it now."""
        now_s = self._network.now_s()
        return any(fault.vice is vice and fault.start_s <= now_s < fault.end_s for fault in self._faults)

    def pass_on_s(self, size_bytes: int) -> float:
        """Seconds until a message that comes here has reached the other end."""
        delay_s = self._budget.delay_s(size_bytes)
        if self.has(RelayVice.THROTTLES):
            delay_s = max(delay_s, self._throttled.delay_s(size_bytes))
        return delay_s + self._network.transit_s(self.node_id, size_bytes)

    def dial_back(self, caller: NodeId) -> DialBack:
        """Whether the caller can be dialled. Raises Unavailable."""
        self.require_open()
        self.table.take_dial_back(caller, self._clock.monotonic_s())
        is_reached = self._network.is_dialable(caller) and not self._network.is_cut(self.node_id, caller)
        if is_reached:
            self.dialled[caller] = None
        else:
            self.dialled.pop(caller, None)
        if self.has(RelayVice.LIES):
            self._network.note("lie", self.node_id, caller)
            self._network.lied_to.add(caller)
            is_reached = not is_reached
        host = self._network.endpoint_of(caller).rpartition(":")[0]
        return DialBack(host=host, is_reached=is_reached, detail="" if is_reached else "no answer")


class MemoryPlace:
    """`swarm.interfaces.HeldPlace` at a MemoryRelay."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId, relay: PeerAddress) -> None:
        self._network, self._node_id, self._relay = network, node_id, relay
        self.endpoint = relayed_endpoint(relay.endpoint, relay.node_id)
        self.held = asyncio.Event()

    async def hold(self) -> None:
        """Holds the place until it is lost. Raises Unavailable."""
        network, node_id = self._network, self._node_id
        relay = await network.reach_relay(node_id, self._relay)
        relay.require_open()
        line = Line(network, node_id, relay.node_id, RELAY_PING_S)
        place = None
        try:
            place = relay.table.add(node_id, node_id, lambda: line.cut("the place is another's now"))
            network.count("place", 2 * RESERVE_BYTES)
            await line.wait(network.transit_s(relay.node_id, RESERVE_BYTES))
            relay.held[node_id] = line
            network.note("place", relay.node_id, node_id)
            network.check_relay(relay)
            self.held.set()
            await line.until_cut()
        finally:
            self.held.clear()
            if place is not None:
                relay.table.remove(place)
            if relay.held.get(node_id) is line:
                del relay.held[node_id]
                network.lost_s[node_id, self.endpoint] = network.now_s()
                for through in [each for each in relay.lines if each.server == node_id]:
                    through.cut("the place was lost")
            line.cut("the place is given up")


class RelayedLine(Line):
    """A connection through a relay; it ends with either of its halves, and counts at the relay until then."""

    def __init__(self, network: MemoryNetwork, client: NodeId, server: NodeId, relay: MemoryRelay) -> None:
        self.relay = relay
        self._counted = ExitStack()
        self._counted.enter_context(relay.table.connection(server, client, client))
        super().__init__(network, client, server, RELAY_PING_S, via=relay.node_id)
        relay.lines[self] = None
        network.check_relay(relay)

    def cut(self, reason: str) -> None:
        """As of `Line`."""
        super().cut(reason)
        self._counted.close()
        self.relay.lines.pop(self, None)

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """As of `Line`, by way of the relay."""
        if self.relay.has(RelayVice.WITHHOLDS):
            # what does not come is noticed by what asks whether the other end is there
            asyncio.get_running_loop().call_later(2 * RELAY_PING_S, self.cut, "its far end does not answer")
            return 3 * RELAY_PING_S
        return super().transit_s(sender, size_bytes) + self.relay.pass_on_s(size_bytes)
