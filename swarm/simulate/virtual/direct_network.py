"""In-memory network without relays: direct connections with the latency, bandwidth and faults of a plan.

Invariant: every random decision comes from one seeded generator, so that a run on a virtual loop repeats exactly. A cut
of a connection wakes everything that waits on the connection; a stream keeps its order, except for items sent late.
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
    """A network whose nodes connect directly, under the faults of a plan."""

    def __init__(self, seed: int, faults: FaultPlan, observe: Observer | None = None) -> None:
        """Creates the network at network time 0; call this on the event loop that runs the nodes."""
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
        self.control_bytes: Counter[str] = Counter()  # by kind; neither groups nor weights
        self.outward: frozenset[NodeId] = frozenset()  # nodes that nobody can dial
        self.lied_to: set[NodeId] = set()  # nodes that got a false dial-back report
        self.check_stream: Callable[[NodeId, NodeId, Cursor, bool], None] = lambda reader, author, at, is_begun: None
        """Called with reader, author and position of a stream that begins (True) or of an item that arrives (False)."""

    def now_s(self) -> float:
        """Seconds since the network was made."""
        return self._loop.time() - self._origin_s

    def add(self, node_id: NodeId) -> int:
        """Registers a node and returns its number in the fault plan; a second call returns the same number."""
        return self._numbers.setdefault(node_id, len(self._numbers))

    def is_parted(self) -> bool:
        """True while any partition lasts."""
        now_s = self.now_s()
        return any(p.start_s <= now_s < p.end_s for p in self.faults.partitions)

    def is_cut(self, a: NodeId, b: NodeId) -> bool:
        """True while a partition separates the two nodes."""
        if not self.faults.partitions:
            return False
        now_s, first, second = self.now_s(), self.add(a), self.add(b)
        return any(p.start_s <= now_s < p.end_s and p.cuts(first, second) for p in self.faults.partitions)

    def crash(self, node_id: NodeId) -> None:
        """Takes a node off the network: the node answers no call, and each connection from, to or through it breaks."""
        self._handlers.pop(node_id, None)
        for line in self._lines.pop(node_id, {}):
            line.cut(f"{node_id[:8]} is gone")

    # What transports and lines need.

    def serve(self, node_id: NodeId, handler: ExchangeHandler) -> str:
        """Registers the handler that answers for a node; returns the node's endpoint."""
        self.add(node_id)
        self._handlers[node_id] = handler
        return self.name(node_id)

    def name(self, node_id: NodeId) -> str:
        """Registers the endpoint of a node, without a handler, and returns the endpoint."""
        endpoint = self.endpoint_of(node_id)
        self._nodes_at[endpoint] = node_id
        return endpoint

    def endpoint_of(self, node_id: NodeId) -> str:
        """The endpoint of a node, also of one that cannot be dialled there."""
        return f"{node_id[:16]}.memory:1"

    def is_dialable(self, node_id: NodeId) -> bool:
        """True unless the node is one that nobody can dial."""
        return node_id not in self.outward

    def lines_of(self, client: NodeId) -> "list[Line]":
        """The open connections that `client` opened."""
        return [line for line in self._lines.get(client, {}) if line.client == client]

    def count(self, kind: str, num_bytes: float) -> None:
        """Adds control bytes of one kind to `control_bytes`."""
        self.control_bytes[kind] += int(num_bytes)

    def handler_at(self, endpoint: str) -> tuple[NodeId, ExchangeHandler] | None:
        """Id and handler of the live node at an endpoint; None if there is none."""
        node_id = self._nodes_at.get(endpoint, "")
        handler = self._handlers.get(node_id)
        return None if handler is None else (node_id, handler)

    def handler(self, node_id: NodeId) -> ExchangeHandler | None:
        """The handler of a node; None if the node is not live."""
        return self._handlers.get(node_id)

    def handler_of(self, node_id: NodeId) -> ExchangeHandler:
        """The handler of a node. Raises Unavailable if the node is not live."""
        handler = self._handlers.get(node_id)
        if handler is None:
            raise Unavailable(f"{node_id[:8]} does not answer")
        return handler

    def next_cut_s(self, a: NodeId, b: NodeId) -> float:
        """Seconds until the next partition between two nodes begins; 0 during one, inf if none is planned."""
        now_s, first, second = self.now_s(), self.add(a), self.add(b)
        ahead = [
            max(0.0, p.start_s - now_s) for p in self.faults.partitions if p.end_s > now_s and p.cuts(first, second)
        ]
        return min(ahead, default=math.inf)

    def attach(self, line: "Line") -> None:
        """Records an open connection under both its ends and its relay."""
        for node_id in line.ends:
            self._lines.setdefault(node_id, {})[line] = None

    def detach(self, line: "Line") -> None:
        """Removes the record of a connection."""
        for node_id in line.ends:
            self._lines.get(node_id, {}).pop(line, None)

    def happens(self, rate: float) -> bool:
        """Decides at random whether a fault of this rate happens; rate 0 consumes no random number."""
        return rate > 0 and self._rng.random() < rate

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """Queues a message at the sender's uplink; returns the seconds until it arrives, with latency and jitter."""
        now_s = self.now_s()
        sent_s = max(now_s, self._uplink_free_s.get(sender, 0.0)) + size_bytes / self.faults.bytes_per_s
        self._uplink_free_s[sender] = sent_s
        jitter_s = self._rng.expovariate(1 / self.faults.jitter_s) if self.faults.jitter_s > 0 else 0.0
        return sent_s - now_s + self.faults.latency_s + jitter_s

    def lateness_s(self) -> float:
        """Random delay of a reordered message, seconds."""
        return self._rng.uniform(0.0, self.faults.reorder_s)

    def corrupt(self, data: bytes) -> bytes:
        """Returns a copy of the data with one random bit flipped; no data counts as one zero byte."""
        changed = bytearray(data or b"\0")
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def note(self, kind: str, sender: NodeId, receiver: NodeId) -> None:
        """Counts one event and reports it to the observer."""
        self.counts[kind] += 1
        if self._observe is not None:
            self._observe(self.now_s(), kind, sender, receiver)


class Line:
    """A connection between two nodes; a cut, as at the start of a partition, wakes every waiter."""

    def __init__(
        self, network: "DirectNetwork", client: NodeId, server: NodeId, ping_s: float = PING_S, via: NodeId = ""
    ) -> None:
        """Opens a connection, through the relay `via` if given; the client pings after `ping_s` seconds of silence."""
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
        """True until the connection is cut."""
        return not self._reason

    def cut(self, reason: str) -> None:
        """Breaks the connection and wakes its waiters; a second call does nothing."""
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
        """Notes that a message reached the client, and counts the pings of the silence before."""
        now_s = self._network.now_s()
        num_pings = 0 if self._num_carried else int((now_s - self._quiet_since_s) / self._ping_s)
        if num_pings:
            self._network.count("ping", num_pings * PING_BYTES * (len(self.ends) - 1))
        self._quiet_since_s = now_s

    def carry(self, change: int) -> None:
        """Adds 1 or -1 to the number of relayed connections over this line."""
        self.note_arrival()
        self._num_carried += change

    def transit_s(self, sender: NodeId, size_bytes: int) -> float:
        """Seconds until a message that `sender` sends now has reached the other end of the connection."""
        return self._network.transit_s(sender, size_bytes)

    async def until_cut(self) -> None:
        """Waits without a time limit until the connection breaks, then raises Unavailable."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        with self.waking(partial(_wake, waiter)):
            await waiter
        self.check()

    def check(self) -> None:
        """Raises Unavailable if the connection is broken."""
        if self._reason:
            raise Unavailable(f"connection to {self.server[:8]} broke: {self._reason}")

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Generator[None]:
        """Calls `wake` if the connection breaks during the block. Raises Unavailable if it is already broken."""
        self.check()
        key = object()
        self._wakers[key] = wake
        try:
            yield
        finally:
            del self._wakers[key]

    async def wait(self, seconds: float) -> None:
        """Waits for some seconds. Raises Unavailable as soon as the connection breaks."""
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
    """Items of one stream that were sent and not read yet; `room` limits the sender, `read` waits for arrivals."""

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
        """Sends an item that arrives at `at_s` (loop time), but not before an item of an earlier `send`."""
        self._num_free -= 1
        if not self._travelling and at_s <= self._loop.time():
            self._arrive(item)
            return
        self._travelling.append((at_s, item))
        if self._timer is None:
            self._timer = self._loop.call_at(at_s, self._land)

    def send_late(self, item: Item, at_s: float) -> None:
        """Sends an item that arrives at `at_s` (loop time), regardless of other items."""
        self._num_free -= 1
        self._num_late += 1
        self._late[self._num_late] = self._loop.call_at(at_s, self._land_late, self._num_late, item)

    def end(self, error: Exception) -> None:
        """Ends the stream with `error`, which arrives with the last item of `send` that is in flight, else at once."""
        if self._travelling:
            self._travelling.append((self._travelling[-1][0], error))
        else:
            self._arrive(error)

    def break_off(self, error: Exception) -> None:
        """Breaks the stream: `error` arrives now, before the items in flight."""
        self._arrive(error)

    def stop(self) -> None:
        """Stops the stream for the reader: drops all items and timers."""
        for timer in (*self._late.values(), *([] if self._timer is None else [self._timer])):
            timer.cancel()
        self._arrived.clear()  # an error in it holds the frames that hold this
        self._travelling.clear()

    async def read(self) -> Item | Exception:
        """Waits for the next arrival and returns it: an item, or the error that ended the stream."""
        while not self._arrived:
            self._reader = self._loop.create_future()
            await self._reader
        self._num_free += 1
        if self._sender is not None:
            _wake(self._sender)
        return self._arrived.popleft()

    async def room(self) -> None:
        """Waits until fewer than WINDOW items are unread."""
        while self._num_free <= 0:
            self._sender = self._loop.create_future()
            await self._sender
            self._sender = None

    def _land(self) -> None:
        """Delivers every item whose time of arrival has come."""
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
