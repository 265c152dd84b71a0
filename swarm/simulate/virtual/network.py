"""Faulty network in memory: members, latency, bandwidth, and the faults of a plan.

Invariant: every decision comes from one seeded generator, so under a virtual loop a run is the same each time.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable

from swarm.errors import Unavailable
from swarm.interfaces import ExchangeHandler
from swarm.simulate.virtual.connection import Line
from swarm.simulate.virtual.faults import FaultPlan
from swarm.types import NodeId

Observer = Callable[[float, str, NodeId, NodeId], None]
"""Called with network time, kind of event, sender and receiver; for event logs."""


class MemoryNetwork:
    """Nodes that reach each other through a fault plan.

    Example:
        network = MemoryNetwork(seed=1, faults=FaultPlan.random(1, num_nodes=4, duration_s=60))
        transport = MemoryTransport(network, identity.node_id)
    """

    def __init__(self, seed: int, faults: FaultPlan, observe: Observer | None = None) -> None:
        """Must be made on the event loop that runs the nodes: its time 0 is now."""
        self.faults = faults
        self.counts: Counter[str] = Counter()  # events by kind: delivered, drop, corrupt, duplicate, ...
        self._rng = random.Random(f"network {seed}")
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._numbers: dict[NodeId, int] = {}
        self._handlers: dict[NodeId, ExchangeHandler] = {}
        self._nodes_at: dict[str, NodeId] = {}  # endpoint -> node
        self._lines: dict[NodeId, dict[Line, None]] = {}  # open ones, in the order in which they were opened
        self._uplink_free_s: dict[NodeId, float] = {}

    def now_s(self) -> float:
        """Seconds since the network was made."""
        return self._loop.time() - self._origin_s

    def add(self, node_id: NodeId) -> int:
        """The number of a node in the fault plan; the same again after a restart."""
        return self._numbers.setdefault(node_id, len(self._numbers))

    def is_parted(self) -> bool:
        """Whether any partition is on now."""
        now_s = self.now_s()
        return any(p.start_s <= now_s < p.end_s for p in self.faults.partitions)

    def is_cut(self, a: NodeId, b: NodeId) -> bool:
        """Whether a partition separates the two now (also for a MemoryDirectory's `can_see`)."""
        if not self.faults.partitions:
            return False
        now_s, first, second = self.now_s(), self.add(a), self.add(b)
        return any(p.start_s <= now_s < p.end_s and p.cuts(first, second) for p in self.faults.partitions)

    def crash(self, node_id: NodeId) -> None:
        """The node is gone at once: it answers nobody and every connection from or to it breaks."""
        self._handlers.pop(node_id, None)
        for line in self._lines.pop(node_id, {}):
            line.cut(f"{node_id[:8]} is gone")

    # What transports and lines need.

    def serve(self, node_id: NodeId, handler: ExchangeHandler) -> str:
        """Registers who answers for a node; returns its endpoint."""
        self.add(node_id)
        self._handlers[node_id] = handler
        endpoint = _endpoint(node_id)
        self._nodes_at[endpoint] = node_id
        return endpoint

    def handler_at(self, endpoint: str) -> tuple[NodeId, ExchangeHandler] | None:
        """The live node behind an endpoint."""
        node_id = self._nodes_at.get(endpoint, "")
        handler = self._handlers.get(node_id)
        return None if handler is None else (node_id, handler)

    def handler_of(self, node_id: NodeId) -> ExchangeHandler:
        """The handler of a live node. Raises Unavailable."""
        handler = self._handlers.get(node_id)
        if handler is None:
            raise Unavailable(f"{node_id[:8]} does not answer")
        return handler

    def next_cut_s(self, a: NodeId, b: NodeId) -> float:
        """Seconds until the next partition between the two begins; 0 during one, inf when none is planned."""
        now_s, first, second = self.now_s(), self.add(a), self.add(b)
        ahead = [
            max(0.0, p.start_s - now_s) for p in self.faults.partitions if p.end_s > now_s and p.cuts(first, second)
        ]
        return min(ahead, default=math.inf)

    def attach(self, line: "Line") -> None:
        """Remembers an open connection under both its ends."""
        for node_id in (line.client, line.server):
            self._lines.setdefault(node_id, {})[line] = None

    def detach(self, line: "Line") -> None:
        """Forgets a closed connection."""
        for node_id in (line.client, line.server):
            self._lines.get(node_id, {}).pop(line, None)

    def happens(self, rate: float) -> bool:
        """One seeded decision; draws nothing when the fault is off."""
        return rate > 0 and self._rng.random() < rate

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """Seconds until a message sent now has arrived: queueing at the sender's uplink, latency and jitter."""
        now_s = self.now_s()
        sent_s = max(now_s, self._uplink_free_s.get(sender, 0.0)) + size_bytes / self.faults.bytes_per_s
        self._uplink_free_s[sender] = sent_s
        jitter_s = self._rng.expovariate(1 / self.faults.jitter_s) if self.faults.jitter_s > 0 else 0.0
        return sent_s - now_s + self.faults.latency_s + jitter_s

    def lateness_s(self) -> float:
        """How late a reordered message comes, seconds."""
        return self._rng.uniform(0.0, self.faults.reorder_s)

    def corrupt(self, data: bytes) -> bytes:
        """The same with one bit flipped."""
        changed = bytearray(data or b"\0")
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def note(self, kind: str, sender: NodeId, receiver: NodeId) -> None:
        """Counts and reports one event."""
        self.counts[kind] += 1
        if self._observe is not None:
            self._observe(self.now_s(), kind, sender, receiver)


def _endpoint(node_id: NodeId) -> str:
    return f"{node_id[:16]}.memory:1"
