"""Network in memory without relays: members, latency, bandwidth, the faults of a plan, and direct connections.

Invariant: every decision comes from one seeded generator, so under a virtual loop a run is the same each time. Every
wait on a connection wakes when it is cut; a stream keeps its order, except for items made late.
"""

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from swarm.errors import Unavailable
from swarm.interfaces import ExchangeHandler
from swarm.simulate.virtual.faults import FaultPlan
from swarm.types import Cursor, NodeId, SealedGroup
from swarm.wire.session import PING_S

Item = TypeVar("Item")

HANDSHAKE_BYTES = 6226  # measured: two TLS greetings and the proofs of both ends, both directions
PING_BYTES = 160  # a ping and its answer as IP packets, both directions
WINDOW = 8  # items in flight on one stream before its sender has to wait

Observer = Callable[[float, str, NodeId, NodeId], None]
"""Called with network time, kind of event, sender and receiver; for event logs."""


class DirectNetwork:
    """Nodes that reach each other through a fault plan, without relays."""

    def __init__(self, seed: int, faults: FaultPlan, observe: Observer | None = None) -> None:
        """Must be made on the event loop that runs the nodes: its time 0 is now."""
        self.faults = faults
        self.counts: Counter[str] = Counter()  # events by kind: delivered, drop, corrupt, duplicate, ...
        self._rng = random.Random(f"network {seed}")
        self._observe = observe
        self.inspect: Callable[[NodeId, SealedGroup], None] | None = None  # called with each group that a node sends
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._numbers: dict[NodeId, int] = {}
        self._handlers: dict[NodeId, ExchangeHandler] = {}
        self._nodes_at: dict[str, NodeId] = {}  # endpoint -> node
        self._lines: dict[NodeId, dict[Line, None]] = {}  # open ones, in the order in which they were opened
        self._uplink_free_s: dict[NodeId, float] = {}
        self.control_bytes: Counter[str] = Counter()  # all that is no group and no weights, by kind
        self.outward: frozenset[NodeId] = frozenset()  # nodes that nobody can dial
        self.lied_to: set[NodeId] = set()  # by those who were to dial them
        self.check_stream: Callable[[NodeId, NodeId, Cursor, bool], None] = lambda reader, author, at, is_begun: None
        """Called with reader, author and position of a stream that begins there, or brings an item."""

    def now_s(self) -> float:
        """Seconds since the network was made."""
        return self._loop.time() - self._origin_s

    def add(self, node_id: NodeId) -> int:
        """The number of a node in the fault plan; the same again after a restart."""
        return self._numbers.setdefault(node_id, len(self._numbers))

    def is_parted(self) -> bool:
        """True while any partition is on."""
        now_s = self.now_s()
        return any(p.start_s <= now_s < p.end_s for p in self.faults.partitions)

    def is_cut(self, a: NodeId, b: NodeId) -> bool:
        """True while a partition separates the two (also for a MemoryDirectory's `can_see`)."""
        if not self.faults.partitions:
            return False
        now_s, first, second = self.now_s(), self.add(a), self.add(b)
        return any(p.start_s <= now_s < p.end_s and p.cuts(first, second) for p in self.faults.partitions)

    def crash(self, node_id: NodeId) -> None:
        """The node is gone at once: it answers nobody and every connection from, to or through it breaks."""
        self._handlers.pop(node_id, None)
        for line in self._lines.pop(node_id, {}):
            line.cut(f"{node_id[:8]} is gone")

    # What transports and lines need.

    def serve(self, node_id: NodeId, handler: ExchangeHandler) -> str:
        """Registers who answers for a node; returns its endpoint."""
        self.add(node_id)
        self._handlers[node_id] = handler
        return self.name(node_id)

    def name(self, node_id: NodeId) -> str:
        """Gives a node its endpoint."""
        endpoint = self.endpoint_of(node_id)
        self._nodes_at[endpoint] = node_id
        return endpoint

    def endpoint_of(self, node_id: NodeId) -> str:
        """The address of a node, even of one that cannot be dialled there."""
        return f"{node_id[:16]}.memory:1"

    def is_dialable(self, node_id: NodeId) -> bool:
        """True where a connection to the node's own endpoint arrives."""
        return node_id not in self.outward

    def lines_of(self, client: NodeId) -> "list[Line]":
        """The open connections that a node opened."""
        return [line for line in self._lines.get(client, {}) if line.client == client]

    def count(self, kind: str, num_bytes: float) -> None:
        """Control bytes of one kind."""
        self.control_bytes[kind] += int(num_bytes)

    def handler_at(self, endpoint: str) -> tuple[NodeId, ExchangeHandler] | None:
        """The live node behind an endpoint."""
        node_id = self._nodes_at.get(endpoint, "")
        handler = self._handlers.get(node_id)
        return None if handler is None else (node_id, handler)

    def handler(self, node_id: NodeId) -> ExchangeHandler | None:
        """The handler of a node; None where it is not live."""
        return self._handlers.get(node_id)

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
        for node_id in line.ends:
            self._lines.setdefault(node_id, {})[line] = None

    def detach(self, line: "Line") -> None:
        """Forgets a closed connection."""
        for node_id in line.ends:
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
        """Delay of a reordered message, seconds."""
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


class Line:
    """One open connection; a cut, as at the start of a partition, wakes every waiter."""

    def __init__(
        self, network: "DirectNetwork", client: NodeId, server: NodeId, ping_s: float = PING_S, via: NodeId = ""
    ) -> None:
        """`via`: the relay in between, if any; `ping_s`: silence after which the client pings."""
        self._network, self.client, self.server = network, client, server
        self.ends = (client, server, via) if via else (client, server)
        self._ping_s, self._quiet_since_s = ping_s, network.now_s()
        self._num_carried = 0  # relayed connections over this line: their bytes are its signs of life
        self._loop = asyncio.get_running_loop()
        self._reason = ""  # why it broke; empty while it holds
        self._wakers: dict[object, Callable[[], object]] = {}
        halves = ((client, via), (via, server)) if via else ((client, server),)
        until_cut_s = min(network.next_cut_s(*half) for half in halves)
        self._partition = None if math.isinf(until_cut_s) else self._loop.call_later(until_cut_s, self.cut, "partition")
        network.attach(self)

    @property
    def is_open(self) -> bool:
        """False once it was cut."""
        return not self._reason

    def cut(self, reason: str) -> None:
        """Breaks the connection; idempotent."""
        if self._reason:
            return
        self.note_arrival()
        self._reason = reason
        if self._partition is not None:
            self._partition.cancel()
        self._network.detach(self)
        for wake in list(self._wakers.values()):
            wake()

    def note_arrival(self) -> None:
        """A message reached the client, which pinged at each `ping_s` of the silence before it."""
        now_s = self._network.now_s()
        num_pings = 0 if self._num_carried else int((now_s - self._quiet_since_s) / self._ping_s)
        if num_pings:
            self._network.count("ping", num_pings * PING_BYTES * (len(self.ends) - 1))
        self._quiet_since_s = now_s

    def carry(self, change: int) -> None:
        """One more (1) or one less (-1) connection goes through this line."""
        self.note_arrival()
        self._num_carried += change

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """Seconds until a message that one end sends now has reached the other."""
        return self._network.transit_s(sender, size_bytes)

    async def until_cut(self) -> None:
        """Waits until it breaks, for ever if need be. Raises Unavailable then."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        with self.waking(partial(_wake, waiter)):
            await waiter
        self.check()

    def check(self) -> None:
        """Raises Unavailable when the connection is broken."""
        if self._reason:
            raise Unavailable(f"connection to {self.server[:8]} broke: {self._reason}")

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Generator[None]:
        """Calls `wake` if the connection breaks within. Raises Unavailable when it is broken already."""
        self.check()
        key = object()
        self._wakers[key] = wake
        try:
            yield
        finally:
            del self._wakers[key]

    async def wait(self, seconds: float) -> None:
        """Lets time pass on an open connection. Raises Unavailable as soon as it breaks."""
        if seconds > 0:
            self.check()
            waiter: asyncio.Future[None] = self._loop.create_future()
            timer = self._loop.call_later(seconds, _wake, waiter)
            self._wakers[waiter] = partial(_wake, waiter)
            try:
                await waiter
            finally:
                del self._wakers[waiter]
                timer.cancel()
        self.check()


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class UnderWay(Generic[Item]):
    """Items of one stream that were sent and not read yet: a sender waits for room, a reader for arrivals."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._travelling: deque[tuple[float, Item | Exception]] = deque()  # loop time of arrival, ascending
        self._timer: asyncio.TimerHandle | None = None  # of the first of them
        self._arrived: deque[Item | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._num_free = WINDOW
        self._sender: asyncio.Future[None] | None = None
        self._late: dict[int, asyncio.TimerHandle] = {}
        self._num_late = 0

    def send(self, item: Item, at_s: float) -> None:
        """The item arrives at `at_s` (loop time), behind all that was sent before it."""
        self._num_free -= 1
        if not self._travelling and at_s <= self._loop.time():
            self._arrive(item)
            return
        self._travelling.append((at_s, item))
        if self._timer is None:
            self._timer = self._loop.call_at(at_s, self._land)

    def send_late(self, item: Item, at_s: float) -> None:
        """The item arrives at `at_s` (loop time), whatever arrives before it."""
        self._num_free -= 1
        self._num_late += 1
        self._late[self._num_late] = self._loop.call_at(at_s, self._land_late, self._num_late, item)

    def end(self, error: Exception) -> None:
        """Ends the stream after the items in flight; the reader gets the reason."""
        if self._travelling:
            self._travelling.append((self._travelling[-1][0], error))
        else:
            self._arrive(error)

    def break_off(self, error: Exception) -> None:
        """Cuts the stream: the reader gets the error at once."""
        self._arrive(error)

    def stop(self) -> None:
        """Ends the stream from the reader's side."""
        for timer in (*self._late.values(), *([] if self._timer is None else [self._timer])):
            timer.cancel()
        self._arrived.clear()  # an error in it holds the frames that hold this
        self._travelling.clear()

    async def read(self) -> Item | Exception:
        """The next arrival, or why there is none."""
        while not self._arrived:
            self._reader = self._loop.create_future()
            await self._reader
        self._num_free += 1
        if self._sender is not None:
            _wake(self._sender)
        return self._arrived.popleft()

    async def room(self) -> None:
        """Waits until another item may be sent."""
        while self._num_free <= 0:
            self._sender = self._loop.create_future()
            await self._sender
            self._sender = None

    def _land(self) -> None:
        """Everything that has travelled long enough arrives."""
        travelling = self._travelling
        due_s = max(self._loop.time(), travelling[0][0])  # a loop may run a timer a little early
        while travelling and travelling[0][0] <= due_s:
            self._arrive(travelling.popleft()[1])
        self._timer = self._loop.call_at(travelling[0][0], self._land) if travelling else None

    def _land_late(self, number: int, item: Item) -> None:
        del self._late[number]
        self._arrive(item)

    def _arrive(self, what: Item | Exception) -> None:
        self._arrived.append(what)
        if self._reader is not None:
            _wake(self._reader)
