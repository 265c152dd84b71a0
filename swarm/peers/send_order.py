"""Order of sending: peers that give groups before those that only take, where sending is what limits this node.

Invariant: where all that there is goes out at once nobody waits; elsewhere those who give nothing have, together, one
item of SHARE. Nobody is refused.

That sending is the limit shows at those who give: most of them have not got all there is. Whether an item is under way
says little, since the windows of a connection take many at once and then none for seconds. One that takes no item for
STUCK_S does not count, nor do few origins among many, however many keys and streams they have: who reads slowly is no
reason to hold up others.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from swarm.clock import Clock
from swarm.flow import Signal
from swarm.peers.reputation import Reputation
from swarm.trust_policy import GIVER_SCORE, SHARE
from swarm.types import NodeId

STUCK_S: Final = 10.0  # without an item taken by one who gives, until it does not count; others wait no longer either
_LOOK_S: Final = 1.0


@dataclass(eq=False, frozen=True, slots=True)
class Stream:
    """A stream of groups to a peer."""

    origin: str  # of the peer


class SendOrder:
    """Who gives groups, and whether sending to them takes all that this node can send.

    Args:
        reputation: what peers gave: an admitted group counts for its producer, whoever relayed it.
        clock: of the node.
        origin_of: the party or subnet of a peer; empty where that is not known.

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
        self._streams: dict[Stream, float | None] = {}  # to those who give: last item taken; None: it has all
        self._num_since = 0  # items to those who give, since the last one to others
        self._sent = Signal()
        self._others = asyncio.Lock()  # held by the one of them whose turn is next

    def is_giver(self, peer: NodeId) -> bool:
        """Whether groups that it made were admitted lately."""
        return self._reputation.score(peer) >= GIVER_SCORE

    @contextmanager
    def stream(self, peer: NodeId) -> Generator[Stream]:
        """A stream to a peer, until it ends."""
        stream = Stream(self._origin_of(peer) or peer)
        try:
            yield stream
        finally:
            if stream in self._streams:
                del self._streams[stream]
                self._sent.fire()

    @contextmanager
    def item(self, stream: Stream, *, is_first: bool) -> Generator[None]:
        """While the transport takes an item of a stream; `is_first`: of one who gives."""
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
        """A stream has nothing more to send for now."""
        if self._streams.get(stream) is not None:
            self._streams[stream] = None
            self._sent.fire()

    async def turn(self) -> None:
        """Waits until it is the turn of an item to somebody who gives nothing, one after the other."""
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
