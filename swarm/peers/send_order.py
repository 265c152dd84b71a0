"""Order of sending: peers that give groups come before peers that only take, where sending limits this node.

Invariants: no peer waits while everything goes out at once, and no peer is refused. While givers wait, all peers that
give nothing together get one item in SHARE (`SendOrder`), and under an upload limit one byte in SHARE, in turns by
subnet because keys are free (`UploadLimit`).

Sending is the limit while most givers have not received everything. An item under way is no evidence: a connection
accepts many at once and then none for seconds. A giver that accepts no item for STUCK_S does not count, and neither do
few origins among many, however many keys and streams they have: slow readers must not hold up others.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from swarm.clock import Clock
from swarm.fairness import FairTable
from swarm.flow import Signal
from swarm.peers.reputation import Reputation
from swarm.trust_policy import GIVER_SCORE, SHARE
from swarm.types import NodeId

BURST_S: Final = 1.0  # of bytes that may leave at once after a silence
STUCK_S: Final = 10.0  # without an item taken by one who gives, until it does not count; others wait no longer either
_LOOK_S: Final = 1.0


@dataclass(eq=False, frozen=True, slots=True)
class Stream:
    """A stream of groups to a peer."""

    peer: NodeId
    origin: str  # party or subnet of the peer, else its id


class SendOrder:
    """Turns of peers: givers first, while sending to givers takes all that this node can send.

    Args:
        reputation: scores of the peers: an admitted group counts for its producer, even if another peer relayed it.
        clock: clock of the node.
        origin_of: returns the party or subnet of a peer; "" if that is not known.

    Example:
        with order.stream(peer) as stream:
            is_first = order.is_giver(peer)
            if not is_first:
                await order.turn()
            with order.item(stream, is_first=is_first):
                yield item
            order.has_all(stream)
    """

    def __init__(self, reputation: Reputation, clock: Clock, origin_of: Callable[[NodeId], str] = lambda _: "") -> None:
        self._reputation = reputation
        self._origin_of = origin_of
        self._clock = clock
        self._streams: dict[Stream, float | None] = {}  # to givers: last item taken; None: has all
        self._num_since = 0  # items to givers since the last one to others
        self._sent = Signal()
        self._others = asyncio.Lock()  # held by the non-giver whose turn is next

    def is_giver(self, peer: NodeId) -> bool:
        """True if enough groups that the peer produced were admitted lately."""
        return self._reputation.score(peer) >= GIVER_SCORE

    @contextmanager
    def stream(self, peer: NodeId) -> Generator[Stream]:
        """Context of a stream to a peer; when it ends, the stream no longer counts."""
        stream = Stream(peer, self._origin_of(peer) or peer)
        try:
            yield stream
        finally:
            if stream in self._streams:
                del self._streams[stream]
                self._sent.fire()

    @contextmanager
    def item(self, stream: Stream, *, is_first: bool) -> Generator[None]:
        """Context in which the transport accepts an item of a stream; `is_first`: the peer is a giver."""
        if not is_first:
            self._streams.pop(stream, None)
            yield
            return
        if self._streams.get(stream) is None:
            self._streams[stream] = self._clock.monotonic_s()
        try:
            yield
        finally:
            self._streams[stream] = self._clock.monotonic_s()
            self._num_since += 1
            self._sent.fire()

    def has_all(self, stream: Stream) -> None:
        """Records that a stream has nothing more to send for now."""
        if self._streams.get(stream) is not None:
            self._streams[stream] = None
            self._sent.fire()

    async def turn(self) -> None:
        """Waits until an item may go to a peer that gives nothing; one item waits at a time, for at most STUCK_S."""
        async with self._others:
            latest_s = self._clock.monotonic_s() + STUCK_S
            while self._is_busy() and self._num_since < SHARE - 1 and self._clock.monotonic_s() < latest_s:
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._sent.wait()
                except TimeoutError:
                    continue  # what is stuck does not count any more
            self._num_since = 0

    def _is_busy(self) -> bool:
        since_s = self._clock.monotonic_s() - STUCK_S
        sending = {of.origin for of, taken_s in self._streams.items() if taken_s is not None and taken_s > since_s}
        givers = {stream.origin for stream in self._streams}
        return 2 * len(sending) > len(givers)


class UploadLimit:
    """A token bucket for bytes, with a queue in front.

    Invariant: in t seconds at most the bytes of BURST_S + t seconds leave, and one message more.

    Args:
        bytes_per_s: rate, above 0.
        clock: clock of the node.
        is_giver: returns True if a peer gives groups that this node uses.
    """

    def __init__(
        self, bytes_per_s: int, clock: Clock, is_giver: Callable[[NodeId], bool] = lambda node_id: True
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock, self._is_giver = clock, is_giver
        self._free_at_s = clock.monotonic_s() - BURST_S  # all bytes that were let go have left by then
        # givers by node id, all other peers by subnet
        self._waiting = {gives: FairTable[str, _Waiter]() for gives in (True, False)}
        self._owed_bytes = 0  # that givers sent, times their share, ahead of those who give nothing
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, peer: NodeId, subnet: str, num_bytes: int) -> None:
        """Waits until `num_bytes` may go to a peer; peers of one `subnet` that give nothing share one turn."""
        gives = self._is_giver(peer)
        party, waiter = peer if gives else subnet, _Waiter(num_bytes)
        self._waiting[gives].add(party, waiter)
        self._let_go()
        try:
            await waiter.turn
        finally:
            self._waiting[gives].remove(party, waiter)

    def _let_go(self) -> None:
        """Releases the messages that may go now, and sets a timer for the next one."""
        now_s = self._clock.monotonic_s()
        self._free_at_s = max(self._free_at_s, now_s - BURST_S)
        while any(self._waiting.values()) and self._free_at_s <= now_s:
            waiter = self._next()
            if not waiter.turn.done():
                self._free_at_s += waiter.num_bytes / self._bytes_per_s
                waiter.turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if any(self._waiting.values()):
            self._timer = asyncio.get_running_loop().call_later(self._free_at_s - now_s, self._let_go)

    def _next(self) -> "_Waiter":
        givers, others = self._waiting[True], self._waiting[False]
        if not (givers and others):
            self._owed_bytes = 0
            table = givers or others
            return table.pop_oldest(next(iter(table.parties)))
        gives = self._owed_bytes <= 0
        waiter = self._waiting[gives].pop_oldest(next(iter(self._waiting[gives].parties)))
        self._owed_bytes += waiter.num_bytes if gives else -(SHARE - 1) * waiter.num_bytes
        return waiter


class _Waiter:
    """A message that waits for its turn."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
