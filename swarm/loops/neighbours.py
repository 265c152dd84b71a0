"""Streams from neighbours: the peers from which a node takes groups, and the groups it takes from each.

Invariant: every group that is taken goes to admission; the stream of a neighbour that moved, failed or misbehaved ends.
"""

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from swarm.errors import NotHeld, TooLarge, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.exchange.group_ingest import Fetch
from swarm.flow import Backoff
from swarm.interfaces import Discovery, PeerAddress, PeerClient, StreamItem, Transport
from swarm.loops.choose_peers import choose_peers, sample_adverts, unlisted_followers
from swarm.loops.dial import AddressTrials, dial
from swarm.loops.notices import Notice, StreamPositions
from swarm.loops.supervise import run_once, supervise
from swarm.peers.reputation import UNPROVEN
from swarm.types import Advert, Cursor, Refused, SealedGroup, StreamFilter, short

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 30.0
# A group that does not come in this time plus that of its bytes on a slow line is also fetched from other announcers.
PASS_ON_S: Final = 3.0
_SLOW_BYTES_PER_S: Final = 2**17
MAX_ROUNDS: Final = 4  # of trials begun after one look-up, while addresses answer
NOTICES_S: Final = 600.0  # neighbours announce others' groups so long after there were more nodes than neighbours
FIRST_LOOK_S: Final = 2.0  # until the next look-up of a node that is alone; doubles, up to `exchange.lookup_every_s`
LASTING_S: Final = 30.0  # a stream that ends sooner and brought nothing counts as a failure


async def neighbours_loop(agent: Agent, transport: Transport, directory: Discovery, rng: random.Random) -> None:
    """Looks at the directory and streams groups from a few peers; one that moved, failed or misbehaved is dropped.

    The loop looks again sooner while the node knows nobody, and while nobody reaches the node and no advert names a
    relay; otherwise not, as a look-up of a large directory is the largest traffic after groups and weights. While the
    directory does not answer, or names nobody, working neighbours stay, and known peers and anchors are dialled.
    """
    positions = StreamPositions(agent.config.exchange.max_group_bytes)
    followed: dict[tuple[PeerAddress, bool], NeighbourStream] = {}  # (peer, with notices of others' groups)
    adverts: list[Advert] = []
    notices_until_s = -math.inf
    alone_s = FIRST_LOOK_S
    async with asyncio.TaskGroup() as tasks:
        trials = AddressTrials(agent, transport, tasks)
        while True:
            if agent.is_paused:  # cursors stay: groups missed in the pause and not too old come afterwards
                for key in list(followed):
                    followed.pop(key).stop()
                await agent.resumed()
            try:
                adverts = sample_adverts(agent, await directory.lookup(), rng)
                agent.peers.observe(adverts)
            except Unavailable as error:
                logger.info("directory lookup failed", extra={"error": str(error)})
            now_s = agent.clock.monotonic_s()
            if len(adverts) - 1 > agent.config.exchange.max_neighbours:
                notices_until_s = now_s + NOTICES_S
            next_s = agent.clock.monotonic_s() + agent.config.exchange.lookup_every_s * rng.uniform(0.8, 1.2)
            soon_s = min(next_s, now_s + alone_s * rng.uniform(0.8, 1.2))
            for num_answers in itertools.count():
                agent.address_book.observe(adverts)  # also of peers that answered in a trial
                choice = choose_peers(agent, adverts, now_s < notices_until_s, rng)
                wanted = choice.streams | unlisted_followers(agent, followed, adverts)
                for address, with_notices in [key for key in followed if key not in wanted]:
                    instead = followed.get((address, not with_notices))
                    is_handed_over = (address, not with_notices) not in wanted or (instead and instead.is_connected)
                    if is_handed_over:
                        followed.pop((address, with_notices)).stop()
                for address, with_notices in sorted(wanted - followed.keys(), key=lambda key: key[0].node_id):
                    follow = followed[address, with_notices] = NeighbourStream(
                        agent, transport, address, with_notices, positions, rng
                    )
                    follow.start(tasks)
                if num_answers < MAX_ROUNDS:
                    trials.begin(choice.trials)
                if not await trials.answered(timeout_s=max(0.0, next_s - agent.clock.monotonic_s())):
                    break
            is_alone = await _is_alone(agent, adverts, until_s=next_s)
            if is_alone:
                await asyncio.sleep(max(0.0, soon_s - agent.clock.monotonic_s()))
            alone_s = min(2 * alone_s, agent.config.exchange.lookup_every_s) if is_alone else FIRST_LOOK_S


async def _is_alone(agent: Agent, adverts: Sequence[Advert], until_s: float) -> bool:
    """Waits until the directory lists nobody else, or no relay while nobody reaches us; False at `until_s`."""
    try:
        async with asyncio.timeout(max(0.0, until_s - agent.clock.monotonic_s())):
            await agent.context.changed.until(lambda: len(adverts) < 2 or not (agent.endpoints or agent.peers.relays))
    except TimeoutError:
        return False
    return True


@dataclass(eq=False, repr=False)
class NeighbourStream:
    """Stream of one neighbour: connects, subscribes at the last cursor, and passes groups that are wanted to admission.

    Groups that the neighbour made are judged in order while nothing more is read; groups that it announces are fetched
    one after the other and judged beside the stream.
    """

    _agent: Agent
    _transport: Transport
    _address: PeerAddress
    _with_notices: bool  # it also announces the groups of others
    _positions: StreamPositions  # cursors and notices, which outlive a stream
    _rng: random.Random  # jitter of waits

    def __post_init__(self) -> None:
        replay = self._agent.config.replay
        # where a step waits for everybody's groups of its round, those without signal are waited for too
        self._wanted = StreamFilter(
            relay=self._with_notices,
            wants_zero_variance=replay.keep_zero_variance or replay.barrier,
            wants_turn_signal=replay.keep_turn_signal,
            wants_commitments=True,
        )
        self._cursors = self._positions.cursors
        self._notices = self._positions.notices_of(self._address.node_id, self._agent.standing)
        self._backoff, self._fetch_backoff = Backoff(self._rng), Backoff(self._rng)
        self._client: PeerClient | None = None  # while connected
        self._group: asyncio.TaskGroup | None = None  # owns the tasks
        self._tasks: list[asyncio.Task[None]] = []
        self._receiving: asyncio.Task[Any] | None = None  # the one of them whose group is under admission
        self._is_over = False

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Starts the tasks of the stream, which run until `stop`; a broken stream is opened again after a wait."""
        self._group = tasks
        for what, loop in (("follow", self._follow), ("fetch from", self._fetch_announced)):
            name = f"{what} {short(self._address.node_id)}"
            self._tasks.append(tasks.create_task(supervise(name, loop, self._agent, self._rng), name=name))

    def stop(self) -> None:
        """Ends the stream, but not during an admission: a group stored and not used would be a duplicate ever after."""
        self._is_over = True
        for task in self._tasks:
            if task is not self._receiving:
                task.cancel()

    @property
    def is_connected(self) -> bool:
        """True while the neighbour is connected."""
        return self._client is not None

    async def _follow(self) -> None:
        while True:
            try:
                await self._session()
            except Unauthenticated as error:
                extra = {"peer": short(self._address.node_id), "error": str(error)}
                logger.warning("peer not authenticated", extra=extra)
            except Unavailable as error:
                logger.debug("peer unavailable", extra={"peer": short(self._address.node_id), "error": str(error)})
            await self._backoff.wait()

    async def _session(self) -> None:
        peer = self._address.node_id
        self._agent.reputation.require_allowed(peer)
        client = await dial(self._agent, self._transport, self._address)
        cursor, began_s, num_items = self._cursors.get(peer, Cursor()), self._agent.clock.monotonic_s(), 0
        try:
            self._client = client
            self._notices.changed.fire()
            self._agent.peers.set_connected(peer, True)
            self._agent.context.changed.fire()
            async for item in client.subscribe(cursor, self._wanted):
                num_items += 1
                self._agent.ingest.count_item(peer)
                await self._take(item)
                self._agent.reputation.require_allowed(peer)
                self._cursors[peer] = item.cursor
                self._backoff.reset()
                self._agent.address_book.record_working(self._address)
        except Unavailable:
            is_useless = not num_items and self._agent.clock.monotonic_s() - began_s < LASTING_S
            if is_useless or self._address.relay is not None:  # another relay may lead there at once
                self._agent.address_book.record_failure(self._address)
            raise
        finally:
            self._client = None
            self._agent.peers.set_connected(peer, False)
            self._agent.context.changed.fire()
            await client.close()

    async def _take(self, item: StreamItem) -> None:
        """Takes an item of the stream: commitments, a group, or the notice of one."""
        latency_ms = self._agent.config.faults.latency_ms
        if latency_ms:
            await asyncio.sleep(latency_ms / 1000)
        ingest = self._agent.ingest
        self._agent.novelty.commit(item.commitments, via=self._address.node_id)
        if not item.digest:
            return
        if item.sealed is None:
            is_held = await self._agent.store.contains(item.digest)
            if not is_held and item.size_bytes <= self._agent.config.exchange.max_group_bytes:
                await self._notices.add(Notice(item.digest, item.size_bytes, item.producer))
        elif ingest.is_wanted_from(self._address.node_id):
            await self._receive(item.sealed)
        else:
            ingest.bytes_received += item.sealed.size_bytes

    # --- groups that it announces -------------------------------------------------------------------------

    async def _fetch_announced(self) -> None:
        """Fetches announced groups, one after the other, beside the stream; other tasks wait for the verdicts."""
        while True:
            await self._notices.changed.until(lambda: self._client is not None and self._notices.has_next())
            notice, client = self._notices.take(), self._client
            assert client is not None and self._group is not None
            try:
                self._agent.reputation.require_allowed(self._address.node_id)
                fetched = await self._fetch(client, notice)
            except BaseException as error:
                self._notices.put_back(notice, has_failed=isinstance(error, Unavailable))
                if not isinstance(error, Unavailable):
                    raise
                logger.debug("peer unavailable", extra={"peer": short(self._address.node_id), "error": str(error)})
                await self._fetch_backoff.wait()
                continue
            self._fetch_backoff.reset()
            if fetched is None:
                self._notices.end(notice)
            else:
                # of the loop's group and not of this stream: it ends when the verdict is there
                self._group.create_task(self._judge(*fetched, notice), name=f"judge {short(notice.digest)}")

    async def _fetch(self, client: PeerClient, notice: Notice) -> tuple[SealedGroup, Fetch] | None:
        """Returns the group of a notice, and its `Fetch`, not settled yet; None if there is nothing to fetch here.

        Raises Unavailable if the neighbour does not deliver; another neighbour that announced the group then tries.
        """
        ingest, digest = self._agent.ingest, notice.digest
        if await self._agent.store.contains(digest):
            return None
        # Asked after the store: while that answered, another stream may have begun to fetch it.
        if ingest.fetching.announce(digest, self._address.node_id, partial(self._notices.put, notice)):
            return None
        if not ingest.is_wanted_from(self._address.node_id):
            return None
        fetch, sealed = ingest.fetching.begin(digest), None
        soon_s = PASS_ON_S + notice.size_bytes / _SLOW_BYTES_PER_S
        late = asyncio.get_running_loop().call_later(soon_s, ingest.fetching.pass_on, digest, fetch)
        try:
            sealed = await client.fetch(digest, notice.size_bytes, FETCH_TIMEOUT_S)
        except (NotHeld, TooLarge) as error:
            logger.debug("notice not followed", extra={"peer": short(self._address.node_id), "error": str(error)})
        finally:
            late.cancel()
            if sealed is None:
                ingest.fetching.pass_on(digest, fetch)
        return None if sealed is None else (sealed, fetch)

    async def _judge(self, sealed: SealedGroup, fetch: Fetch, notice: Notice) -> None:
        """Admits a fetched group; if it is refused and anybody may have forged it, the next announcer is asked."""
        is_settled = False

        async def judge() -> None:
            nonlocal is_settled
            result = await self._agent.ingest.receive(sealed, via=self._address.node_id)
            is_settled = not isinstance(result, Refused) or result.reason not in UNPROVEN

        try:
            await run_once("judge", judge, self._agent)
        finally:
            self._notices.end(notice)
            if is_settled:
                self._agent.ingest.fetching.settle(notice.digest, fetch)
            else:
                self._agent.ingest.fetching.pass_on(notice.digest, fetch)

    # --- groups that it made ------------------------------------------------------------------------------

    async def _receive(self, sealed: SealedGroup) -> None:
        self._receiving = asyncio.current_task()
        try:
            await self._agent.ingest.receive(sealed, via=self._address.node_id)
        finally:
            self._receiving = None
        if self._is_over:
            raise asyncio.CancelledError  # which `stop` put off
