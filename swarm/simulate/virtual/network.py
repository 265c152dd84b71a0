"""In-memory network with relays: reservations at relays, and connections through them.

Invariant: a relayed connection counts at its relay from its beginning to its end.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from swarm.addresses import relayed_endpoint, split_relayed
from swarm.errors import Unavailable
from swarm.exchange.grpc_transport import ROUTER_PING_S
from swarm.interfaces import PeerAddress
from swarm.relay.relaying_transport import RELAY_PING_S
from swarm.simulate.virtual.direct_network import HANDSHAKE_BYTES, DirectNetwork, Line, Observer
from swarm.simulate.virtual.faults import FaultPlan, RelayVice
from swarm.simulate.virtual.relay import RESERVE_BYTES, UNHEARD_S, MemoryRelay
from swarm.types import NodeId


class MemoryNetwork(DirectNetwork):
    """A network whose nodes connect directly or through relays, under the faults of a plan.

    Example:
        network = MemoryNetwork(seed=1, faults=FaultPlan.random(1, num_nodes=4, duration_s=60))
        transport = MemoryTransport(network, identity.node_id)
    """

    def __init__(self, seed: int, faults: FaultPlan, observe: Observer | None = None) -> None:
        """Creates the network at network time 0; call this on the event loop that runs the nodes."""
        super().__init__(seed, faults, observe)
        self.relays: dict[NodeId, MemoryRelay] = {}  # of live nodes, and the coordinator's
        self.lost_s: dict[tuple[NodeId, str], float] = {}  # when a node last lost its reservation of that endpoint
        self.check_relay: Callable[[MemoryRelay], None] = lambda relay: None  # called when a relay holds more

    def crash(self, node_id: NodeId) -> None:
        """Takes a node and its relay off the network; see `DirectNetwork.crash`."""
        self.relays.pop(node_id, None)
        super().crash(node_id)

    async def reach_relay(self, caller: NodeId, relay: PeerAddress, timeout_s: float = 5.0) -> MemoryRelay:
        """Calls the relay at an address and returns it after the round trip. Raises Unavailable if no relay answers."""
        if self.is_cut(caller, relay.node_id) or not self.is_dialable(relay.node_id):
            await asyncio.sleep(timeout_s)
            raise Unavailable(f"no answer from {relay.endpoint} in {timeout_s} s")
        await asyncio.sleep(2 * self.faults.latency_s)
        found = self.relays.get(relay.node_id)
        if found is None or self._nodes_at.get(relay.endpoint) != relay.node_id:
            raise Unavailable(f"{relay.endpoint} refused the connection")
        if not found.has_session(caller):
            self.count("connect", HANDSHAKE_BYTES)
        return found

    def is_held(self, node_id: NodeId, endpoint: str) -> bool:
        """True while the node holds a reservation at the relay of this endpoint."""
        relay = self.relays.get(split_relayed(endpoint)[1])
        return relay is not None and node_id in relay.held


class MemoryReservation:
    """`swarm.interfaces.Reservation` at a MemoryRelay."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId, relay: PeerAddress) -> None:
        self._network, self._node_id, self._relay = network, node_id, relay
        self.endpoint = relayed_endpoint(relay.endpoint, relay.node_id)
        self.held = asyncio.Event()

    async def hold(self) -> None:
        """Makes the reservation and holds it until cancelled. Raises Unavailable if it is refused or lost."""
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
    """A connection through a relay; a break of either half ends it, and it counts at the relay until then."""

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
        """Breaks the connection and frees its place at the relay; a second call does nothing."""
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
                room.cancel()  # a caller that gave up takes no bytes
            self.check()

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """Seconds until a message sent now has passed the relay and arrived; a withheld one outlasts the connection."""
        if self.relay.has(RelayVice.WITHHOLDS):  # the unanswered ping ends the connection
            self._timers.append(self._loop.call_later(UNHEARD_S, self._end_unheard))
            return 2 * UNHEARD_S
        return super().transit_s(sender, size_bytes) + self._network.transit_s(self.relay.node_id, size_bytes)

    def _end_unheard(self) -> None:
        if self.relay.has(RelayVice.WITHHOLDS):
            self.cut("its far end does not answer")
