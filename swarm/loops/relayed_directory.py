"""Directory through relays, for a node whose network blocks the directory's own peers.

Invariant: adverts are signed, so a relay can withhold them but not change them. Relays are asked in turn, and adverts
are announced at all of them, so a relay that withholds hides nobody for long. The directory's own peers are used beside
the relays, and alone only while a configured bootstrap peer answers: any other peer may belong to an attacker.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.flow import in_pieces
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, Reachability
from swarm.peers.dht_records import CHECKED_AT_ONCE
from swarm.types import Advert, short
from swarm.wire.adverts import seal_advert

if TYPE_CHECKING:
    from swarm.peers.discovery_dht import HivemindDirectory

logger = logging.getLogger(__name__)

LOOKUP_EVERY_S: Final = 4.0
PATIENCE_S: Final = 2.0  # with the DHT or a relay, where another one answered, or can be asked beside it


@dataclass(eq=False, repr=False)
class RelayedDirectory:
    """`swarm.interfaces.Discovery` over a DHT peer, and also over relays while no bootstrap peer of the DHT answers."""

    _directory: "HivemindDirectory"  # the DHT peer
    _transport: Reachability  # asks relays
    _relays: Callable[[], list[PeerAddress]]  # helpers, the best first; none where others can dial us
    _identity: Identity
    _clock: Clock

    def __post_init__(self) -> None:
        self._looked_s = -math.inf
        self._num_looks = 0
        self._asked: dict[str, asyncio.Future[Unavailable | None]] = {}  # the newest look at the DHT, and at relays

    def _helpers(self) -> list[PeerAddress]:
        return [] if self._directory.is_bootstrapped else self._relays()

    async def announce(self, advert: Advert) -> None:
        """Publishes our advert in the DHT and at relays. Raises Unavailable if no DHT peer and no relay takes it."""
        advert = self._directory.outlasting(advert)
        data = seal_advert(advert, self._identity)
        calls = [
            partial(self._directory.announce, advert),
            *(partial(self._transport.announce_at, each, data) for each in self._helpers()),
        ]
        stored, *relayed = await asyncio.gather(*map(_failure, calls))  # side by side: a relay may be slow
        # a DHT peer without other peers kept the advert for itself
        tries = [stored, *relayed] if self._directory.num_peers or not relayed else relayed
        failures = [each for each in tries if each is not None]
        if len(failures) == len(tries):
            raise failures[0]

    async def lookup(self) -> list[Advert]:
        """Returns the verified adverts of the run that are known so far; later answers count in the next look-up.

        Raises Unavailable if neither the DHT nor a relay answers.
        """
        if not self._helpers():
            return await self._directory.lookup()
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= LOOKUP_EVERY_S:
            self._looked_s = now_s
            self._begin("relays", self._ask_relays)
        self._begin("DHT", self._directory.lookup)
        await asyncio.wait(self._asked.values(), timeout=PATIENCE_S)
        await asyncio.wait(self._asked.values(), return_when=asyncio.FIRST_COMPLETED)
        answers = [asked.result() for asked in self._asked.values() if asked.done()]
        failures = [each for each in answers if each is not None]
        if len(failures) == len(self._asked):
            raise failures[0]
        return self._directory.seen()

    def _begin(self, name: str, ask: Callable[[], Awaitable[object]]) -> None:
        """Starts a look-up by `ask`, unless the last one of this name is under way."""
        before = self._asked.get(name)
        if before is None or before.done():
            self._asked[name] = asyncio.ensure_future(_failure(ask))

    async def _ask_relays(self) -> None:
        """Takes the adverts of one relay, and of the next if that fails or is slow. Raises Unavailable if all fail."""
        helpers = self._helpers()
        first = self._num_looks % max(1, len(helpers))
        self._num_looks += 1
        asked: list[asyncio.Task[Unavailable | None]] = []
        async with asyncio.TaskGroup() as tasks:  # the slow one counts too: the quick one may withhold
            for relay in (*helpers[first:], *helpers[:first]):
                asked.append(tasks.create_task(_failure(partial(self._take_from, relay))))
                await asyncio.wait(asked[-1:], timeout=PATIENCE_S)
                if any(task.done() and task.result() is None for task in asked):
                    break
        failures = [failure for task in asked if (failure := task.result()) is not None]
        if len(failures) == len(asked):
            raise failures[0] if failures else Unavailable("no relay to ask")

    async def _take_from(self, relay: PeerAddress) -> None:
        try:
            async for data in in_pieces(await self._transport.records_at(relay), CHECKED_AT_ONCE):
                self._directory.take(data, relay.node_id)
        except Unavailable as error:
            logger.info("a relay gave no adverts", extra={"peer": short(relay.node_id), "error": str(error)})
            raise

    async def maintain(self) -> None:
        """Maintains the DHT peer."""
        await self._directory.maintain()

    async def stop(self) -> None:
        """Stops the DHT peer and every look-up under way."""
        for asked in self._asked.values():
            asked.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self._directory.stop()


async def _failure(call: Callable[[], Awaitable[object]]) -> Unavailable | None:
    """Makes a call; returns its Unavailable, or None. A callable, as a coroutine that never begins would warn."""
    try:
        await call()
    except Unavailable as error:
        return error
    return None
