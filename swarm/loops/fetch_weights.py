"""Fetch of the followed weights: watches the trainer and some other sources, and fetches missing chunks.

Invariant: every fetched chunk belongs to the chain that is planned now; a source that breaks, stalls or lies costs one
connection and a few seconds. The trainer is never given up: neither a look-up that misses it nor a slow chunk ends the
connection over which it grants credit, unless that connection goes through a relay that may be at fault.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.errors import NotHeld, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.exchange.grpc_transport import DIAL_TIMEOUT_S
from swarm.flow import Backoff
from swarm.interfaces import CoordinatorClient, Discovery, PeerAddress, PeerClient, Transport
from swarm.loops.dial import dial
from swarm.loops.supervise import supervise
from swarm.types import Advert, Credit, SealedManifest, short
from swarm.weight_sync.follower import FollowerState, WeightFollower
from swarm.weight_sync.update_planner import News
from swarm.weights.payload import Unusable

logger = logging.getLogger(__name__)

NUM_OTHERS: Final = 2  # sources besides the trainer that are watched
NUM_WITNESSES: Final = 2  # more sources, which claim that the trainer showed others different weights
NUM_FETCHERS: Final = 4  # chunks on their way at a time
MAX_IDLE_ITEMS: Final = 4096  # items without news that a source may send on one watch


async def follow_loop(
    agent: Agent, follower: WeightFollower, transport: Transport, directory: Discovery, rng: random.Random
) -> None:
    """Finds the trainer and other sources, watches them, and fetches weights from them, until cancelled."""
    pause_s = agent.config.exchange.lookup_every_s
    adverts = await _look(directory)
    await follower.on_adverts(adverts)
    while follower.state is FollowerState.SEARCHING:
        await asyncio.sleep(pause_s * rng.uniform(0.8, 1.2))
        adverts = await _look(directory)
        await follower.on_adverts(adverts)
    watched: dict[PeerAddress, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_FETCHERS):
            tasks.create_task(supervise(f"fetch {number}", follower.fetcher.run, agent, rng), name=f"fetch {number}")
        while True:
            if agent.is_paused:
                for address in list(watched):
                    watched.pop(address).cancel()
                await agent.resumed()
            wanted = choose_sources(agent, follower, adverts, watched)
            is_ended = follower.state is FollowerState.ENDED
            if not is_ended and not any(address.node_id == follower.policy_id for address in wanted):
                wanted |= {a for a in watched if a.node_id == follower.policy_id}  # at its last address
            for gone in [address for address, task in watched.items() if address not in wanted or task.done()]:
                watched.pop(gone).cancel()
            for address in sorted(wanted - watched.keys(), key=lambda address: address.node_id):
                watch = SourceWatcher(agent, follower, transport, address, rng)
                name = f"watch {short(address.node_id)}"
                watched[address] = tasks.create_task(supervise(name, watch.run, agent, rng), name=name)
            await asyncio.sleep(pause_s * rng.uniform(0.8, 1.2))
            adverts = await _look(directory) or adverts
            await follower.on_adverts(adverts)


async def _look(directory: Discovery) -> list[Advert]:
    """Adverts of the directory; none if the look-up fails."""
    try:
        return await directory.lookup()
    except Unavailable as error:
        logger.info("directory lookup failed", extra={"error": str(error)})
        return []


def choose_sources(
    agent: Agent, follower: WeightFollower, adverts: Sequence[Advert], watched: Collection[PeerAddress] = ()
) -> set[PeerAddress]:
    """Addresses of the trainer, of up to NUM_OTHERS nodes that serve the lineage, and of witnesses against the trainer.

    The nodes are a random choice, another one for each follower. Nodes that served well come first, so that new
    identities do not take their places. A source that is `watched` keeps its address as long as the address is
    advertised and works: a connection that ends costs the credit on it. Empty once the lineage has ended.
    """
    policy_id = follower.policy_id
    if follower.state is FollowerState.ENDED:
        return set()
    others = [
        advert
        for advert in adverts
        if advert.head.policy_id == policy_id and advert.node_id not in (policy_id, agent.node_id)
        if agent.reputation.is_allowed(advert.node_id) and not follower.sources.is_banned(advert.node_id)
    ]
    served = follower.sources.has_served
    others.sort(key=lambda a: (not served(a.node_id), hashlib.sha256((agent.node_id + a.node_id).encode()).digest()))
    chosen = [*(advert for advert in adverts if advert.node_id == policy_id), *others[:NUM_OTHERS]]
    chosen += choose_witnesses(agent, follower, adverts)
    book = agent.address_book
    kept = {address.node_id: address for address in watched if book.may_dial(address)}

    def address_of(advert: Advert) -> PeerAddress:
        address = kept.get(advert.node_id)
        if address is not None and (address.endpoint in advert.endpoints or address.relay in book.relays):
            return address  # one of our relays leads to nodes that advertise another address
        return book.best_address(advert.node_id, advert.endpoints)

    return {address_of(advert) for advert in chosen if advert.endpoints}


def choose_witnesses(agent: Agent, follower: WeightFollower, adverts: Sequence[Advert]) -> list[Advert]:
    """Adverts of up to NUM_WITNESSES nodes that claim a proof against our trainer, or got other weights from it.

    The choice changes with each look-up: a claim without a proof holds up the others for one look-up at most.
    """
    claiming = [
        advert
        for advert in adverts
        if advert.node_id not in (follower.policy_id, agent.node_id)
        if advert.equivocator == follower.policy_id[:16] or follower.is_suspect(advert.head)
        if agent.reputation.is_allowed(advert.node_id) and not follower.sources.is_banned(advert.node_id)
    ]
    look_up = int(agent.clock.monotonic_s() / agent.config.exchange.lookup_every_s)
    claiming.sort(key=lambda a: hashlib.sha256(f"{look_up} {agent.node_id} {a.node_id}".encode()).digest())
    return claiming[:NUM_WITNESSES]


@dataclass(eq=False, repr=False)
class SourceWatcher:
    """Watcher of one source of weights: connects, watches, and passes every item to the follower, again and again."""

    _agent: Agent
    _follower: WeightFollower
    _transport: Transport
    _address: PeerAddress
    _rng: random.Random

    def __post_init__(self) -> None:
        self._backoff = Backoff(self._rng)
        self._has_sent = False  # an item came on the newest connection

    async def run(self) -> None:
        """Watches until cancelled, or until the source is banned; the trainer is watched even then."""
        peer = self._address.node_id
        while peer == self._follower.policy_id or not self._follower.sources.is_banned(peer):
            try:
                await self._session()
            except Unauthenticated as error:
                logger.warning("source not authenticated", extra={"peer": short(peer), "error": str(error)})
                self._follower.sources.record_unreachable(peer)
            except (NotHeld, Unavailable) as error:
                logger.debug("source unavailable", extra={"peer": short(peer), "error": str(error)})
                if not self._has_sent:
                    self._follower.sources.record_unreachable(peer)
            await self._rest()

    async def _rest(self) -> None:
        """Waits before the next attempt, but no longer than until a newer version becomes known."""
        known = self._follower.known_head_step
        resting = asyncio.ensure_future(self._backoff.wait())
        news = asyncio.ensure_future(self._follower.changed.until(lambda: self._follower.known_head_step > known))
        try:
            await asyncio.wait({resting, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (resting, news):
                waiting.cancel()
            await asyncio.gather(resting, news, return_exceptions=True)

    async def _session(self) -> None:
        peer, policy_id = self._address.node_id, self._follower.policy_id
        self._has_sent = False
        self._agent.reputation.require_allowed(peer)
        if peer == policy_id:  # never given up, and its advert is its own: no budget
            try:
                client = await self._transport.connect(self._address, DIAL_TIMEOUT_S)
            except Unavailable:
                self._note_failure(was_connected=False)
                raise
        else:
            client = await dial(self._agent, self._transport, self._address)
        self._follower.on_connected(peer, client)
        num_idle = 0
        leaving = asyncio.ensure_future(self._leave_where_no_chunk_comes(client))
        try:
            async for item in client.watch(policy_id, self._window):
                num_idle = 0 if await self._take(item) else num_idle + 1
                if num_idle > MAX_IDLE_ITEMS and peer != policy_id:
                    self._follower.sources.record_forgery(peer)
                    raise Unavailable(f"{short(peer)} sent {num_idle} items without news")
                self._has_sent = True
                self._backoff.reset()
        except Unavailable:
            self._note_failure(was_connected=True)
            raise
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            self._follower.on_disconnected(peer, client)
            await client.close()

    async def _leave_where_no_chunk_comes(self, client: PeerClient) -> None:
        """Closes a connection through a relay once requests on it keep failing: another relay may lead there, too."""
        if self._address.relay is not None:
            sources, peer = self._follower.sources, self._address.node_id
            await self._follower.changed.until(lambda: sources.keeps_failing(peer))
            await client.close()

    def _note_failure(self, *, was_connected: bool) -> None:
        """Records a failure of the address if a relay, another one than the failed, may lead to the source at once."""
        book = self._agent.address_book
        if self._address.relay is not None or (book.relays and not was_connected):
            book.record_failure(self._address)

    async def _take(self, item: SealedManifest | Credit) -> bool:
        """Passes an item to the follower; True if it was new. Raises Unavailable if a manifest is unusable."""
        peer = self._address.node_id
        if isinstance(item, Credit):
            await self._follower.on_credit(peer, item)
            return peer == self._follower.policy_id  # nobody else has any to give
        news = await self._follower.on_manifest(peer, item)
        if isinstance(news, Unusable):
            self._follower.sources.record_forgery(peer)
            raise Unavailable(f"a manifest from {short(peer)} is unusable: {news.reason}, {news.detail}")
        return news is News.NEW

    @property
    def _window(self) -> int:
        """Number of groups that we want credit for at a time: one batch from the trainer, 0 from others."""
        is_trainer = self._address.node_id == self._follower.policy_id
        return self._agent.config.generator.groups_per_batch if is_trainer else 0


async def watch_ledger_loop(follower: WeightFollower, coordinator: CoordinatorClient) -> None:
    """Passes the trainer's versions in the coordinator's ledger to the follower. A run goes on without the ledger."""
    await follower.changed.until(lambda: bool(follower.policy_id))
    async for version in coordinator.watch_versions(follower.policy_id):
        follower.on_head(version)
