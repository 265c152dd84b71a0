"""Whose groups a node takes, and what it takes from each of them.

Invariant: everything that comes passes the door; a neighbour that moved, vanished or misbehaved is let go.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

from swarm.errors import NotHeld, TooLarge, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.flow import Backoff, BoundedTable
from swarm.interfaces import Discovery, PeerAddress, PeerClient, StreamItem, Transport
from swarm.loops.supervise import supervise
from swarm.peers.peer_table import MAX_PEERS
from swarm.peers.reputation import UNPROVEN
from swarm.peers.topology import choose_neighbours, rank
from swarm.types import Advert, Cursor, Digest, NodeId, Refused, Role, ScoredGroup, SealedGroup, StreamFilter, short

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 30.0
MAX_FOLLOWERS: Final = 256  # that are followed for the groups they made with our leave
MAX_OWED: Final = 8  # groups that a neighbour is to deliver in another one's place


async def neighbours_loop(agent: Agent, transport: Transport, directory: Discovery, rng: random.Random) -> None:
    """Looks at the directory and follows a few peers; one that moved, vanished or misbehaved is let go."""
    cursors = BoundedTable[NodeId, Cursor](MAX_PEERS)
    followed: dict[tuple[PeerAddress, bool], Follow] = {}  # (peer, with notices of others' groups)
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                adverts = await directory.lookup()
            except Unavailable as error:
                logger.info("directory lookup failed", extra={"error": str(error)})
            else:
                agent.peers.observe(adverts)
                wanted = whom_to_follow(agent, adverts)
                wanted |= missed(agent, followed, adverts)
                for gone in [key for key in followed if key not in wanted]:
                    followed.pop(gone).let_go()
                for address, relayed in sorted(wanted - followed.keys(), key=lambda key: key[0].node_id):
                    follow = followed[address, relayed] = Follow(agent, transport, address, relayed, cursors, rng)
                    follow.start(tasks)
            await asyncio.sleep(agent.config.exchange.lookup_every_s * rng.uniform(0.8, 1.2))


def whom_to_follow(agent: Agent, adverts: Sequence[Advert]) -> set[tuple[PeerAddress, bool]]:
    """Peers whose groups are taken, and whether with notices of others' groups.

    Those who follow us, for what they make with our leave, and of the rest as the overlay has it. A node that only
    generates takes no groups of others, so where groups have to be handed on it is no station on the way.
    """
    if agent.weight_follower is not None and Role.RELAY not in agent.config.roles:
        return set()
    limit = agent.config.exchange.max_neighbours
    welcome = [advert for advert in adverts if agent.reputation.is_allowed(advert.node_id)]
    relay = len(adverts) - 1 > limit
    others = [a for a in welcome if a.node_id not in agent.credit_ledger.followers]
    stations = [a for a in others if Role.TRAINER in a.roles or Role.RELAY in a.roles] if relay else others
    chosen = {(_address_of(a), relay) for a in choose_neighbours(agent.node_id, stations, limit)}
    return chosen | {(_address_of(a), False) for a in choose_followers(agent, welcome)}


def choose_followers(agent: Agent, welcome: Sequence[Advert]) -> list[Advert]:
    """Whoever follows us and has delivered; of the others as many as could have leave, those who have it first.

    What they hand on of others is not asked for: of them we take, whatever our appetite, what we gave leave for.
    """
    config, status, delivered = agent.config, agent.credit_ledger.status(), agent.peers.delivered_steps
    most = max(config.exchange.max_neighbours, (config.replay.max_age_steps + 1) * config.replay.local_groups)
    followers = [a for a in welcome if a.node_id in status and a.endpoints]

    def order(advert: Advert) -> tuple[bool, bytes]:
        credit = status[advert.node_id]
        return credit["granted"] <= credit["delivered"] + credit["expired"], rank(agent.node_id, advert.node_id)

    known = [a for a in followers if a.node_id in delivered]
    new = [a for a in followers if a.node_id not in delivered]
    return [*sorted(known, key=order)[:MAX_FOLLOWERS], *sorted(new, key=order)[:most]]


def missed(
    agent: Agent, followed: Collection[tuple[PeerAddress, bool]], adverts: Sequence[Advert]
) -> set[tuple[PeerAddress, bool]]:
    """Whoever has our leave and is followed, but not in the directory just now: its groups are waited for."""
    found = {advert.node_id for advert in adverts if advert.endpoints}
    return {
        (address, relay)
        for address, relay in followed
        if address.node_id in agent.credit_ledger.followers - found and agent.reputation.is_allowed(address.node_id)
    }


def _address_of(advert: Advert) -> PeerAddress:
    return PeerAddress(node_id=advert.node_id, endpoint=advert.endpoints[0])


class Follow:
    """One neighbour: connect, subscribe where we left off, pass everything through the door."""

    def __init__(
        self,
        agent: Agent,
        transport: Transport,
        address: PeerAddress,
        relay: bool,
        cursors: dict[NodeId, Cursor],
        rng: random.Random,
    ) -> None:
        self._agent = agent
        self._transport = transport
        self._address = address
        replay = agent.config.replay
        # where a step waits for everybody's groups of its round, those without signal are waited for too
        self._wanted = StreamFilter(relay=relay, zero_variance=replay.keep_zero_variance or replay.barrier)
        self._cursors = cursors
        self._rng = rng
        self._backoff = Backoff(rng)
        self._client: PeerClient | None = None  # while connected
        self._owed: asyncio.Queue[Digest] = asyncio.Queue(MAX_OWED)  # announced here too, not delivered elsewhere
        self._tasks: list[asyncio.Task[None]] = []
        self._receiving: set[asyncio.Task[Any] | None] = set()  # those of them whose group passes the door
        self._is_over = False

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Follows until let go; a broken stream is opened again after a wait."""
        for what, loop in (("follow", self._follow), ("catch up", self._catch_up)):
            name = f"{what} {short(self._address.node_id)}"
            self._tasks.append(tasks.create_task(supervise(name, loop, self._agent, self._rng), name=name))

    def let_go(self) -> None:
        """Ends it, but not while a group passes the door: stored and not used, it would be a duplicate ever after."""
        self._is_over = True
        for task in self._tasks:
            if task not in self._receiving:
                task.cancel()

    def take_over(self, digest: Digest) -> bool:
        """Will fetch what another neighbour announced as well and did not deliver. False where that cannot be."""
        if self._client is None or self._owed.full():
            return False
        self._owed.put_nowait(digest)
        return True

    async def _follow(self) -> None:
        while True:
            try:
                await self._session()
            except Unauthenticated as error:
                logger.warning(
                    "peer not authenticated", extra={"peer": short(self._address.node_id), "error": str(error)}
                )
            except Unavailable as error:
                logger.debug("peer unavailable", extra={"peer": short(self._address.node_id), "error": str(error)})
            await self._backoff.wait()

    async def _session(self) -> None:
        peer = self._address.node_id
        self._agent.reputation.require_allowed(peer)
        client = await self._transport.connect(self._address, self._agent.config.exchange.dial_timeout_s)
        cursor = self._cursors.get(peer, Cursor())
        try:
            self._client = client
            self._agent.peers.set_connected(peer, True)
            self._agent.context.changed.fire()
            async for item in client.subscribe(cursor, self._wanted):
                self._agent.ingest.hear(peer)
                await self._take(client, item)
                self._agent.reputation.require_allowed(peer)
                cursor = item.cursor
                self._backoff.reset()
        finally:
            self._client = None
            while not self._owed.empty():
                self._hand_on(self._owed.get_nowait())
            self._cursors[peer] = cursor
            self._agent.peers.set_connected(peer, False)
            self._agent.context.changed.fire()
            await client.close()

    async def _take(self, client: PeerClient, item: StreamItem) -> None:
        """An item of the stream: a group, or the notice of one."""
        latency_ms = self._agent.config.faults.latency_ms
        if latency_ms:
            await asyncio.sleep(latency_ms / 1000)
        intake = self._agent.ingest
        if item.sealed is not None:
            if intake.takes_from(self._address.node_id):
                await self._receive(item.sealed)
            else:
                intake.bytes_received += item.sealed.size_bytes
            return
        if item.size_bytes > self._agent.config.exchange.max_group_bytes:
            return
        if await self._agent.store.contains(item.digest):
            return
        others = intake.fetching.get(item.digest)  # asked last: while the store was, another stream may have begun
        if others is not None:
            if self.take_over not in others:
                others.append(self.take_over)
            return
        if not intake.takes_from(self._address.node_id):
            return
        intake.fetching[item.digest] = deque()
        await self._fetch(client, item.digest)

    async def _fetch(self, client: PeerClient, digest: Digest) -> None:
        """What is in `fetching`, to the door; where the neighbour does not deliver it the next one is to."""
        is_settled = False
        try:
            sealed = await client.fetch(digest, self._agent.config.exchange.max_group_bytes, FETCH_TIMEOUT_S)
            result = await self._receive(sealed)
            is_settled = not isinstance(result, Refused) or result.reason not in UNPROVEN
        except (NotHeld, TooLarge) as error:
            logger.debug("notice not followed", extra={"peer": short(self._address.node_id), "error": str(error)})
        finally:
            if is_settled:
                del self._agent.ingest.fetching[digest]
            else:
                self._hand_on(digest)

    async def _catch_up(self) -> None:
        """Fetches what is owed, beside the stream: a neighbour that delivers nothing holds up nobody else's."""
        while True:
            digest = await self._owed.get()
            client = self._client
            if client is None:
                self._hand_on(digest)
                continue
            try:
                await self._fetch(client, digest)
            except Unavailable as error:
                logger.debug("peer unavailable", extra={"peer": short(self._address.node_id), "error": str(error)})

    def _hand_on(self, digest: Digest) -> None:
        """The next neighbour that announced it is to fetch it, or whoever announces it from now on."""
        fetching = self._agent.ingest.fetching
        others = fetching[digest]
        while others:
            if others.popleft()(digest):
                return
        del fetching[digest]

    async def _receive(self, sealed: SealedGroup) -> ScoredGroup | Refused:
        task = asyncio.current_task()
        self._receiving.add(task)
        try:
            result = await self._agent.ingest.receive(sealed, via=self._address.node_id)
        finally:
            self._receiving.discard(task)
        if self._is_over:
            raise asyncio.CancelledError  # what `let_go` put off
        return result
