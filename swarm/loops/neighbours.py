"""Whose groups a node takes, and what it takes from each of them.

Invariant: everything that comes passes the door; a neighbour that moved, vanished or misbehaved is let go.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Sequence

from swarm.errors import NotHeld, TooLarge, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.exchange.overlay import choose_neighbours
from swarm.exchange.peers import keep_newest
from swarm.interfaces import Discovery, PeerAddress, PeerClient, StreamItem, Transport
from swarm.loops.retry import Backoff, supervise
from swarm.types import Advert, Cursor, NodeId, Role, SealedGroup, Wanted, short

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 30.0


async def neighbours_loop(agent: Agent, transport: Transport, directory: Discovery, rng: random.Random) -> None:
    """Looks at the directory and follows a few peers; one that moved, vanished or misbehaved is let go."""
    cursors: dict[NodeId, Cursor] = {}
    followed: dict[tuple[PeerAddress, bool], asyncio.Task[None]] = {}  # (peer, with notices of others' groups)
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                adverts = await directory.lookup()
            except Unavailable as error:
                logger.info("directory lookup failed", extra={"error": str(error)})
            else:
                agent.peers.hear(adverts)
                wanted = whom_to_follow(agent, adverts)
                wanted |= missed(agent, followed, wanted)
                for gone in [key for key in followed if key not in wanted]:
                    followed.pop(gone).cancel()
                for address, relayed in sorted(wanted - followed.keys(), key=lambda key: key[0].node_id):
                    follow = Follow(agent, transport, address, relayed, cursors, rng)
                    followed[address, relayed] = tasks.create_task(
                        supervise(f"follow {short(address.node_id)}", follow.run, agent, rng)
                    )
            await asyncio.sleep(agent.config.exchange.lookup_every_s * rng.uniform(0.8, 1.2))


def whom_to_follow(agent: Agent, adverts: Sequence[Advert]) -> set[tuple[PeerAddress, bool]]:
    """Peers whose groups are taken, and whether with notices of others' groups.

    Everybody who has our leave to make groups, and of the rest as the overlay has it. A node that only generates takes
    no groups of others, so where groups have to be handed on it is no station on the way.
    """
    if agent.following is not None and Role.RELAY not in agent.config.roles:
        return set()
    limit, followers = agent.config.exchange.max_neighbours, agent.leaves.followers
    welcome = [advert for advert in adverts if agent.is_welcome(advert.node_id)]
    relay = len(adverts) - 1 > limit
    stations = [a for a in welcome if Role.TRAINER in a.roles or Role.RELAY in a.roles] if relay else welcome
    chosen = {a.node_id: a for a in choose_neighbours(agent.node_id, stations, limit)}
    chosen |= {a.node_id: a for a in welcome if a.node_id in followers and a.endpoints}
    return {(PeerAddress(node_id=a.node_id, endpoint=a.endpoints[0]), relay) for a in chosen.values()}


def missed(
    agent: Agent, followed: Collection[tuple[PeerAddress, bool]], wanted: Collection[tuple[PeerAddress, bool]]
) -> set[tuple[PeerAddress, bool]]:
    """Whoever has our leave and is followed, but not in the directory just now: its groups are waited for."""
    found = {address.node_id for address, _ in wanted}
    return {
        (address, relay)
        for address, relay in followed
        if address.node_id in agent.leaves.followers - found and agent.is_welcome(address.node_id)
    }


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
        self._wanted = Wanted(relay=relay, silent=replay.keep_silent or replay.barrier)
        self._cursors = cursors
        self._backoff = Backoff(rng)

    async def run(self) -> None:
        """Follows until cancelled; a broken stream is opened again after a wait."""
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
        self._agent.require_welcome(peer)
        client = await self._transport.connect(self._address, self._agent.config.exchange.dial_timeout_s)
        cursor = self._cursors.get(peer, Cursor())
        try:
            await self._agent.set_connected(peer, True)
            async for item in client.subscribe(cursor, self._wanted):
                self._agent.intake.hear(peer)
                sealed = await self._content(client, item)
                if sealed is not None:
                    await self._agent.intake.receive(sealed, via=peer)
                    self._agent.require_welcome(peer)
                cursor = item.cursor
                self._backoff.reset()
        finally:
            keep_newest(self._cursors, peer, cursor)
            await self._agent.set_connected(peer, False)
            await client.close()

    async def _content(self, client: PeerClient, item: StreamItem) -> SealedGroup | None:
        latency_ms = self._agent.config.faults.latency_ms
        if latency_ms:
            await asyncio.sleep(latency_ms / 1000)
        if item.sealed is not None:
            if self._agent.intake.takes_from(self._address.node_id):
                return item.sealed
            self._agent.intake.bytes_received += item.sealed.size_bytes
            return None
        limit = self._agent.config.exchange.max_group_bytes
        fetching = self._agent.intake.fetching
        if item.size_bytes > limit or item.digest in fetching or await self._agent.store.contains(item.digest):
            return None
        if not self._agent.intake.takes_from(self._address.node_id):
            return None
        fetching.add(item.digest)
        try:
            return await client.fetch(item.digest, limit, FETCH_TIMEOUT_S)
        except (NotHeld, TooLarge) as error:
            logger.debug("notice not followed", extra={"peer": short(self._address.node_id), "error": str(error)})
            return None
        finally:
            fetching.discard(item.digest)
