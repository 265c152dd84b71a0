"""How an agent gets the weights it follows: it watches the trainer and some other holders, and fetches what is missing.

Invariant: what is fetched is always on the way that is planned now; a holder that breaks, stalls or lies costs one
connection and a few seconds, and the trainer is the last resort that is never given up: neither a look-up that misses
it nor a chunk that is slow to come ends the connection over which it gives leave.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarm.errors import Forged, NotHeld, StorageFull, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.flow import Backoff
from swarm.interfaces import CoordinatorClient, Discovery, PeerAddress, PeerClient, Transport
from swarm.loops.supervise import supervise
from swarm.types import Advert, Credit, Digest, NodeId, SealedManifest, short
from swarm.weight_sync.follower import WeightFollower
from swarm.weight_sync.update_planner import News
from swarm.weights.unusable import Unusable

logger = logging.getLogger(__name__)

NUM_OTHERS: Final = 2  # holders besides the trainer that are watched
NUM_FETCHERS: Final = 4  # chunks on their way at a time
RETRY_S: Final = 1.0  # between two attempts at the trainer
STORAGE_RETRY_S: Final = 5.0  # between two attempts on a full disk
MAX_IDLE_TALK: Final = 4096  # manifests without news that a holder may send on one watch


async def follow_loop(
    agent: Agent, following: WeightFollower, transport: Transport, directory: Discovery, rng: random.Random
) -> None:
    """Finds the trainer and other holders, watches them, and fetches from them."""
    pause_s = agent.config.exchange.lookup_every_s
    adverts = await _look(directory)
    await following.hear(adverts)
    while not following.is_found:
        await asyncio.sleep(pause_s * rng.uniform(0.8, 1.2))
        adverts = await _look(directory)
        await following.hear(adverts)
    clients: dict[NodeId, PeerClient] = {}
    watched: dict[PeerAddress, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_FETCHERS):
            fetch = Fetcher(following, clients)
            tasks.create_task(supervise(f"fetch {number}", fetch.run, agent, rng), name=f"fetch {number}")
        while True:
            wanted = whom_to_watch(agent, following, adverts)
            if not any(address.node_id == following.policy_id for address in wanted):
                wanted |= {a for a in watched if a.node_id == following.policy_id}  # where it was, until it says more
            for gone in [address for address, task in watched.items() if address not in wanted or task.done()]:
                watched.pop(gone).cancel()
            for address in sorted(wanted - watched.keys(), key=lambda address: address.node_id):
                watch = Watcher(agent, following, transport, address, clients, rng)
                name = f"watch {short(address.node_id)}"
                watched[address] = tasks.create_task(supervise(name, watch.run, agent, rng), name=name)
            await asyncio.sleep(pause_s * rng.uniform(0.8, 1.2))
            adverts = await _look(directory) or adverts
            await following.hear(adverts)


async def _look(directory: Discovery) -> list[Advert]:
    """The directory's adverts; none while it cannot be asked."""
    try:
        return await directory.lookup()
    except Unavailable as error:
        logger.info("directory lookup failed", extra={"error": str(error)})
        return []


def whom_to_watch(agent: Agent, following: WeightFollower, adverts: Sequence[Advert]) -> set[PeerAddress]:
    """The trainer, and up to NUM_OTHERS nodes that serve the lineage: for each follower another random choice.

    Those that served well come first, so that new identities do not take their places.
    """
    policy_id = following.policy_id
    others = [
        advert
        for advert in adverts
        if advert.head.policy_id == policy_id and advert.node_id not in (policy_id, agent.node_id)
        if agent.is_welcome(advert.node_id) and not following.holders.is_banned(advert.node_id)
    ]
    served = following.holders.has_served
    others.sort(key=lambda a: (not served(a.node_id), hashlib.sha256((agent.node_id + a.node_id).encode()).digest()))
    chosen = [*(advert for advert in adverts if advert.node_id == policy_id), *others[:NUM_OTHERS]]
    return {PeerAddress(node_id=a.node_id, endpoint=a.endpoints[0]) for a in chosen if a.endpoints}


class Watcher:
    """One holder: connect, watch, tell the follower what it says; again and again."""

    def __init__(
        self,
        agent: Agent,
        following: WeightFollower,
        transport: Transport,
        address: PeerAddress,
        clients: dict[NodeId, PeerClient],
        rng: random.Random,
    ) -> None:
        self._agent = agent
        self._following = following
        self._transport = transport
        self._address = address
        self._clients = clients
        self._backoff = Backoff(rng)
        self._came = False  # something, on the newest connection

    async def run(self) -> None:
        """Watches until cancelled, or until the holder is not to be asked again soon."""
        peer = self._address.node_id
        while peer == self._following.policy_id or not self._following.holders.is_banned(peer):
            try:
                await self._session()
            except Unauthenticated as error:
                logger.warning("holder not authenticated", extra={"peer": short(peer), "error": str(error)})
                self._following.holders.unreachable(peer)
            except (NotHeld, Unavailable) as error:
                logger.debug("holder unavailable", extra={"peer": short(peer), "error": str(error)})
                if not self._came:
                    self._following.holders.unreachable(peer)
            await self._rest()

    async def _rest(self) -> None:
        """Waits before the next attempt; less long where there is word of a newer version."""
        known = self._following.known_head_step
        resting = asyncio.ensure_future(self._backoff.wait())
        news = asyncio.ensure_future(self._following.changed.until(lambda: self._following.known_head_step > known))
        try:
            await asyncio.wait({resting, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (resting, news):
                waiting.cancel()
            await asyncio.gather(resting, news, return_exceptions=True)

    async def _session(self) -> None:
        peer, policy_id = self._address.node_id, self._following.policy_id
        self._came = False
        self._agent.require_welcome(peer)
        client = await self._transport.connect(self._address, self._agent.config.exchange.dial_timeout_s)
        self._clients[peer] = client
        self._following.connected(peer)
        num_idle = 0
        try:
            async for item in client.watch(policy_id, self._window):
                num_idle = 0 if await self._take(item) else num_idle + 1
                if num_idle > MAX_IDLE_TALK and peer != policy_id:
                    self._following.holders.forged(peer)
                    raise Unavailable(f"{short(peer)} said nothing new {num_idle} times")
                self._came = True
                self._backoff.reset()
        finally:
            if self._clients.get(peer) is client:
                del self._clients[peer]
            self._following.disconnected(peer)
            await client.close()

    async def _take(self, item: SealedManifest | Credit) -> bool:
        """True where it was news."""
        peer = self._address.node_id
        if isinstance(item, Credit):
            await self._following.take_credit(peer, item)
            return True
        heard = await self._following.take(peer, item)
        if isinstance(heard, Unusable):
            self._following.holders.forged(peer)
            raise Unavailable(f"a manifest from {short(peer)} is unusable: {heard.reason}, {heard.detail}")
        return heard is News.NEW

    @property
    def _window(self) -> int:
        """Groups that we want leave for at a time: with `push` the next batch's are there when this one is made."""
        config = self._agent.config
        if self._address.node_id != self._following.policy_id:
            return 0
        return config.generator.groups_per_batch * (2 if config.follow.mode == "push" else 1)


class Fetcher:
    """Gets one missing chunk after the other, each from the holder that is best for it now."""

    def __init__(self, following: WeightFollower, clients: dict[NodeId, PeerClient]) -> None:
        self._following = following
        self._clients = clients

    async def run(self) -> None:
        """Fetches until cancelled."""
        while True:
            await self._following.changed.until(lambda: self._following.next_chunk() is not None)
            wanted = self._following.next_chunk()
            if wanted is not None:
                await self._fetch(*wanted)

    async def _fetch(self, digest: Digest, peer: NodeId) -> None:
        """Asks a holder; where it takes long the trainer as well, and whoever answers first."""
        following, origin = self._following, self._following.policy_id
        following.fetching(digest)
        asked = [self._ask(peer, digest)]
        try:
            await asyncio.wait([asked[0].answer], timeout=following.holders.hedge_after_s(origin))
            if peer != origin and origin in following.holders.connected and not asked[0].answer.done():
                asked.append(self._ask(origin, digest))
            while asked:
                await asyncio.wait([one.answer for one in asked], return_when=asyncio.FIRST_COMPLETED)
                done = next(one for one in asked if one.answer.done())
                asked.remove(done)
                if await self._settle(done, digest):
                    await self._end_late(asked)
        finally:
            for one in asked:
                one.answer.cancel()
                following.holders.gave_up(one.peer)
            following.fetched(digest)

    def _ask(self, peer: NodeId, digest: Digest) -> "_Asked":
        client, holders = self._clients[peer], self._following.holders
        answer = asyncio.ensure_future(client.fetch_chunk(digest, holders.timeout_s(peer)))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # whether anybody reads it or not
        return _Asked(peer, client, holders.asked(peer), asyncio.get_running_loop().time(), answer)

    async def _settle(self, asked: "_Asked", digest: Digest) -> bool:
        """An answer came, or none. True where nobody else is to be waited for."""
        following, peer = self._following, asked.peer
        try:
            data = asked.answer.result()
            seconds = asyncio.get_running_loop().time() - asked.at_s
            await following.put_chunk(digest, data)
            following.holders.served(peer, len(data), seconds)
            return True
        except NotHeld:
            following.holders.lacked(peer, digest)
            following.lacked(digest)
        except (Forged, ValueError) as error:
            logger.error("a holder sent a forged chunk", extra={"peer": short(peer), "error": str(error)})
            following.holders.forged(peer)
            await self._let_go(asked)
        except Unavailable as error:
            logger.info("a chunk did not come", extra={"peer": short(peer), "error": str(error)})
            await self._failed(asked)
        except StorageFull:
            following.holders.gave_up(peer)
            await asyncio.sleep(STORAGE_RETRY_S)
            return True
        except BaseException:
            following.holders.gave_up(peer)
            raise
        return False

    async def _end_late(self, asked: list["_Asked"]) -> None:
        """The chunk came from another: that a holder was overtaken counts against it, the trainer was only helping."""
        while asked:
            late = asked.pop()
            late.answer.cancel()
            if late.peer == self._following.policy_id:
                self._following.holders.gave_up(late.peer)
            else:
                logger.info("a holder was overtaken", extra={"peer": short(late.peer)})
                await self._let_go(late)

    async def _failed(self, asked: "_Asked") -> None:
        """The trainer gets more time at the next attempt: over its connection comes the leave, too."""
        if asked.peer != self._following.policy_id:
            await self._let_go(asked)
            return
        self._following.holders.failed(asked.peer, asked.asked_at_s)
        await asyncio.sleep(RETRY_S)

    async def _let_go(self, asked: "_Asked") -> None:
        """Ends the connection, and asks no more on it; its watcher connects again after a while."""
        peer, client = asked.peer, asked.client
        self._following.holders.failed(peer, asked.asked_at_s)
        if self._clients.get(peer) is client:
            self._following.holders.disconnect(peer)
        await client.close()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A chunk that a holder was asked for."""

    peer: NodeId
    client: PeerClient
    asked_at_s: float  # as the holders' table counts
    at_s: float  # as the loop counts
    answer: asyncio.Future[bytes]


async def watch_ledger_loop(following: WeightFollower, coordinator: CoordinatorClient) -> None:
    """Hears from the coordinator how far the lineage has come. A run goes on without it."""
    await following.changed.until(lambda: bool(following.policy_id))
    async for version in coordinator.watch_versions(following.policy_id):
        following.note_head(version)
