"""Discovery through the hivemind DHT: announce, look up, repair.

Invariant: every call ends within its deadline, with Unavailable at worst; every returned advert was signed by its
author for this run and has not expired, whatever the replicas answer.
"""

import asyncio
import importlib
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from swarm.addresses import dialable_multiaddress
from swarm.clock import Clock
from swarm.config import DirectoryConfig
from swarm.errors import ConfigError, SwarmError, Unavailable
from swarm.flow import BoundedTable, in_pieces
from swarm.identity import Identity
from swarm.peers.dht_records import CHECKED_AT_ONCE, RecordChecker, SeenRecords, check_own, in_turn, shard_of
from swarm.peers.entry import EntryRule
from swarm.process import write_json
from swarm.read_files import read_json
from swarm.types import Advert, NodeId
from swarm.wire.adverts import MAX_ADVERT_TTL_S, author_of, seal_advert

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

    from swarm.peers.dht_node import DhtPeer

logger = logging.getLogger(__name__)

MAX_CACHED_ADDRESSES = 256
"""Peer addresses kept on disk for the next start."""

_CALL_TIMEOUT_S = 10.0
_REPAIR_TIMEOUT_S = 20.0
_RECORDS_EVERY_S = 3.0
_SHARDS_PER_LOOKUP = 4  # the others are remembered from earlier lookups until they expire
_DIALS_PER_ROUND = 8
_MAX_CACHE_BYTES = 256 * 1024
_MAX_ADDRESS_CHARS = 256
_LATER_S = 0.01


class HivemindDirectory:
    """Implementation of `swarm.interfaces.Discovery` with a DHT peer of our own.

    Example:
        directory = await HivemindDirectory.start(identity, "run", config, SystemClock(), Path("node/dht-peers.json"))
        await directory.announce(advert)
        adverts = await directory.lookup()
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        config: DirectoryConfig,
        clock: Clock,
        cache_path: Path | None,
        entry: EntryRule | None = None,
        is_outward: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepares a directory without a DHT peer; use `start` instead."""
        self._is_outward, self._is_client = is_outward, is_outward()
        self._read_s = -math.inf  # when the adverts were looked up for others
        self._identity, self._run_id, self._config = identity, run_id, config
        self._clock, self._cache_path = clock, cache_path
        self._seen = SeenRecords(config.shards)
        self._checker = RecordChecker(run_id, config.shards, clock, entry, self._seen.checked)
        self._known = BoundedTable[str, None](MAX_CACHED_ADDRESSES)  # dialable addresses, oldest first
        self._own: Advert | None = None
        self._peer: DhtPeer | None = None
        self._repairing = asyncio.Lock()
        self._is_stopped = False
        self._is_unanswered = False  # by any DHT peer, since that was logged
        self.num_restarts = 0  # of p2pd, because it was dead
        # Whether a peer of `directory.bootstrap` answered in the last round of repair, where we only ask: whoever else
        # does may be anybody. The routing table keeps peers that nobody asks any more.
        self.is_bootstrapped = False

    @classmethod
    async def start(
        cls,
        identity: Identity,
        run_id: str,
        config: DirectoryConfig,
        clock: Clock,
        cache_path: Path | None,
        entry: EntryRule | None = None,
        is_outward: Callable[[], bool] = lambda: False,
    ) -> "HivemindDirectory":
        """Starts a DHT peer and joins through bootstrap and cached addresses.

        If no address answers, the node is the first of its swarm; `maintain` keeps trying.

        Args:
            cache_path: JSON file of peer addresses from earlier runs; None keeps none.
            entry: rule that decides whose adverts are stored and shown; None: all adverts are.
            is_outward: returns True while other nodes cannot dial this one: it then stores and asks, and holds nothing
                for others. Called again in each round of repair.

        Raises:
            ConfigError: a listening or bootstrap address is invalid or not TCP, or hivemind is not installed.
            Unavailable: the DHT daemon does not start, for instance because the port is taken.
        """
        for address in (config.listen, *config.bootstrap):
            if "/tcp/" not in address or "/udp/" in address:
                raise ConfigError(f"directory: {address!r} is no TCP multiaddress such as /ip4/127.0.0.1/tcp/4001")
        for address in config.bootstrap:
            if not _is_dialable(address):
                raise ConfigError(f"directory.bootstrap: {address!r} does not end in /p2p/<peer id>")
        self = cls(identity, run_id, config, clock, cache_path, entry, is_outward)
        for address in await asyncio.to_thread(_read_cache, cache_path):
            self._known[address] = None
        async with self._repairing:
            await self._restart_peer()
            try:
                async with _bounded(_REPAIR_TIMEOUT_S, "join"):
                    await self._rejoin()
            except Unavailable as error:
                logger.warning("DHT join did not finish", extra={"error": str(error)})
        return self

    def visible_maddrs(self) -> tuple[str, ...]:
        """Multiaddresses at which others can bootstrap from this node; () while there is no DHT peer.

        A rebuild on port 0 changes them.
        """
        return () if self._peer is None else self._peer.addresses

    @property
    def num_peers(self) -> int:
        """Number of DHT nodes in the routing table; 0 means that this node is alone."""
        return 0 if self._peer is None else self._peer.num_known

    @property
    def daemon_pid(self) -> int:
        """Process id of the DHT daemon p2pd. Raises Unavailable while there is none."""
        return self._running().daemon_pid

    async def announce(self, advert: Advert) -> None:
        """Stores this node's advert at the replicas of its shard.

        Raises:
            Unavailable: there are other nodes and none of them took it, the call took too long, or p2pd is not running.
        """
        advert = self.outlasting(advert)
        check_own(advert, self._identity.node_id, self._run_id, self._clock.now_s())
        self._own = advert
        async with _bounded(_CALL_TIMEOUT_S, "announce"):
            await self._announce(advert)

    def outlasting(self, advert: Advert) -> Advert:
        """Our advert, its expiry extended past that of any advert of ours in the DHT, within MAX_ADVERT_TTL_S from now.

        The DHT keeps the record that expires last, which after a restart with the clock set back would be an old one.
        """
        public_key = self._identity.public_key
        newest = self._seen.newest(shard_of(public_key, self._config.shards), public_key)
        if newest is None or newest.expires_at_s <= advert.expires_at_s:
            return advert
        until_s = min(newest.expires_at_s + _LATER_S, self._clock.now_s() + MAX_ADVERT_TTL_S)
        return replace(advert, expires_at_s=until_s)

    async def lookup(self) -> list[Advert]:
        """Adverts of the run, newest per node, from all replicas and earlier look-ups. Raises Unavailable."""
        peer = self._running()
        shards = random.sample(range(self._config.shards), min(_SHARDS_PER_LOOKUP, self._config.shards))
        async with _bounded(_CALL_TIMEOUT_S, "lookup"):
            await asyncio.gather(*(self._read(peer, shard) for shard in shards))
        return self.seen()

    def seen(self) -> list[Advert]:
        """The same adverts as `lookup`, from the records that were read until now."""
        checked = self._seen.items(self._clock.now_s())  # once, as it came: those who flood checks hide nobody
        return [advert for _, advert in checked if self._checker.may_enter(advert)]

    async def pass_on(self, data: bytes) -> bool:
        """Stores an advert as its author signed it, see `swarm.interfaces.RecordKeeper`.

        Returns:
            False if the advert is not accepted, or a newer one of its author is known.

        Raises:
            Unavailable: the DHT does not answer in time.
        """
        checked = self._check(data)
        if checked is None:
            return False
        shard, public_key, advert = checked
        self._seen.put(shard, public_key, data, advert, self._clock.now_s())  # others may have room for it
        newest = self._seen.newest(shard, public_key)
        if newest is not None and newest.expires_at_s > advert.expires_at_s:
            return False
        peer = self._running()
        async with _bounded(_CALL_TIMEOUT_S, "announce"):
            await peer.store(await self._replicas(peer, shard), shard, public_key, data, advert.expires_at_s)
        return True

    async def records(self) -> list[bytes]:
        """The signed adverts of the run that have not expired; looks them up first, at most every few seconds."""
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s > _RECORDS_EVERY_S:
            self._read_s = now_s
            with suppress(Unavailable):
                await self.lookup()
        return [data for data, _ in self._seen.items(self._clock.now_s())]

    def take(self, data: bytes, relay: NodeId) -> bool:
        """Adds an advert from a relay to the results of look-ups; False if it is not accepted or has no room."""
        checked = self._check(data)
        if checked is None:
            return False
        shard, public_key, advert = checked
        return self._seen.put(shard, public_key, data, advert, self._clock.now_s(), relay)

    def _check(self, data: bytes) -> tuple[int, bytes, Advert] | None:
        """Shard, author and content of an advert that did not come through the DHT; None if it is not accepted."""
        found = author_of(data)
        if found is None:
            return None
        public_key, expires_at_s = found
        shard = shard_of(public_key, self._config.shards)
        advert = self._checker.open(shard, public_key, data, expires_at_s, by_relay=True)
        return None if advert is None else (shard, public_key, advert)

    async def maintain(self) -> None:
        """Runs one round of repair: probes p2pd, rejoins, saves peer addresses, and announces our last advert again.

        p2pd is started again if it is dead, and in the other mode if other nodes can dial this one no more, or again.

        Raises:
            Unavailable: p2pd is dead and does not start again, peers took too long, or the directory was stopped.
        """
        async with self._repairing:
            if self._is_stopped:
                raise Unavailable("the directory was stopped")
            async with _bounded(None, "restart"):  # our own process, which has its own bounds
                try:
                    await self._running().connected()
                except Unavailable as error:
                    logger.warning("DHT daemon is dead: starting another", extra={"error": str(error)})
                    self.num_restarts += 1
                    await self._restart_peer()
                if self._is_client != self._is_outward():
                    logger.info("another part in the DHT from now on", extra={"is_client": not self._is_client})
                    await self._restart_peer()
            async with _bounded(_REPAIR_TIMEOUT_S, "repair"):
                await self._rejoin()
            await asyncio.to_thread(_write_cache, self._cache_path, list(self._known))
        if self._own is not None and self._own.expires_at_s > self._clock.now_s():
            async with _bounded(_CALL_TIMEOUT_S, "announce"):
                await self._announce(self._own)

    async def stop(self) -> None:
        """Ends the DHT peer; no daemon and no socket file remain."""
        self._is_stopped = True
        async with self._repairing:
            peer, self._peer = self._peer, None
            if peer is not None:
                await peer.stop()

    def _running(self) -> "DhtPeer":
        if self._peer is None:
            raise Unavailable("the DHT daemon is not running")
        return self._peer

    async def _restart_peer(self) -> None:
        node_module = await _import_node()
        peer, self._peer = self._peer, None
        if peer is not None:
            await peer.stop()
        self._is_client, self.is_bootstrapped = self._is_outward(), False
        self._peer = await node_module.DhtPeer.start(
            self._identity, self._run_id, self._config, self._checker, self._clock, is_client=self._is_client
        )

    async def _rejoin(self) -> None:
        """Dials absent bootstrap peers and some absent cached ones, and adds connected peers to the routing table."""
        peer = self._running()
        connected = await peer.connected()
        own = {address.rpartition("/p2p/")[2] for address in peer.addresses}
        absent = [a for a in self._known if a.rpartition("/p2p/")[2] not in connected]
        wanted = [a for a in self._config.bootstrap if a.rpartition("/p2p/")[2] not in connected]
        wanted += random.sample(absent, min(_DIALS_PER_ROUND, len(absent)))
        wanted = [a for a in dict.fromkeys(wanted) if a.rpartition("/p2p/")[2] not in own]
        num_answers = await peer.dial(wanted)
        bootstrap = {address.rpartition("/p2p/")[2] for address in self._config.bootstrap}
        self.is_bootstrapped = self._is_client and await peer.answers(bootstrap - own)
        await peer.ping_unknown(most=4 * _DIALS_PER_ROUND)
        self._remember((await peer.connected()).values())
        was_unanswered = self._is_unanswered
        self._is_unanswered = bool(wanted) and not num_answers and not self.num_peers
        if self._is_unanswered and not was_unanswered:
            logger.warning(
                "no DHT peer answers, of those known from before and of directory.bootstrap; tried again and again",
                extra={"num_dialled": len(wanted)}
                | ({"meanwhile": "relays ask the directory for this node"} if self._is_client else {}),
            )
        elif was_unanswered and self.num_peers:
            logger.info("DHT peers answer again", extra={"num_peers": self.num_peers})

    def _remember(self, connected: Iterable[str]) -> None:
        """Stores the addresses of connected peers; in a full table only in place of peers that are not connected."""
        dialable = dict.fromkeys(filter(_is_dialable, connected))
        absent = (address for address in list(self._known) if address not in dialable)
        for address in [address for address in dialable if address not in self._known]:
            if len(self._known) >= MAX_CACHED_ADDRESSES:
                gone = next(absent, None)
                if gone is None:
                    return
                del self._known[gone]
            self._known[address] = None

    async def _announce(self, advert: Advert) -> None:
        peer, data = self._running(), seal_advert(advert, self._identity)
        public_key = self._identity.public_key
        shard = shard_of(public_key, self._config.shards)
        self._seen.put(shard, public_key, data, advert, self._clock.now_s())
        replicas = await self._replicas(peer, shard)
        num_stored = await peer.store(replicas, shard, public_key, data, advert.expires_at_s)
        if replicas and not num_stored:
            raise Unavailable(f"none of {len(replicas)} DHT nodes took the advert")

    async def _replicas(self, peer: "DhtPeer", shard: int) -> "list[PeerID]":
        """The other nodes that keep a shard; [] if this node is alone. Raises Unavailable."""
        replicas = await peer.nearest(shard)
        connected = {} if replicas else await peer.connected()  # itself raises when the daemon is dead
        if connected and self._is_client:  # who is connected to a server may be clients, which nobody can ask
            raise Unavailable(f"none of {len(connected)} connected DHT nodes answers")
        return replicas

    async def _read(self, peer: "DhtPeer", shard: int) -> None:
        """Reads a shard from every replica separately, so that no replica can hide records that another holds."""
        replicas = await self._replicas(peer, shard)
        answers = await asyncio.gather(*(peer.ask(replica, shard) for replica in replicas))
        entries = in_turn((peer.held(shard), *answers))
        async for public_key, data, expires_at_s in in_pieces(entries, CHECKED_AT_ONCE):
            advert = self._checker.open(shard, public_key, data, expires_at_s)
            if advert is not None:
                self._seen.put(shard, public_key, data, advert, self._clock.now_s())


async def _import_node() -> Any:
    """Imports hivemind (and torch: about two seconds) in a thread. Raises ConfigError if it is not installed."""
    try:
        return await asyncio.to_thread(importlib.import_module, "swarm.peers.dht_node")
    except ModuleNotFoundError as error:
        raise ConfigError(f'directory.kind = "dht" needs {error.name}: pip install "swarm-trainer[dht]"') from None


@asynccontextmanager
async def _bounded(seconds: float | None, what: str) -> AsyncGenerator[None, None]:
    """Context that raises Unavailable after `seconds`, and for any error but ours: hivemind fails on many inputs."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(f"DHT {what} took over {seconds} s") from None
    except SwarmError:
        raise
    except Exception as error:
        logger.debug("hivemind failed", exc_info=True)
        raise Unavailable(f"DHT {what} failed: {error!r}") from error


def _is_dialable(address: str) -> bool:
    """True for a TCP multiaddress with a port and a peer id."""
    base, _, peer = address.rpartition("/p2p/")
    try:
        return len(address) <= _MAX_ADDRESS_CHARS and peer.isalnum() and bool(dialable_multiaddress(base))
    except ValueError:
        return False


def _read_cache(path: Path | None) -> list[str]:
    """Addresses from an earlier run; [] if the file is missing or broken."""
    if path is None:
        return []
    try:
        addresses = read_json(path, _MAX_CACHE_BYTES)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        logger.warning("peer cache is unreadable", extra={"path": str(path), "error": str(error)})
        return []
    if not isinstance(addresses, list):
        return []
    texts = [a for a in cast(list[object], addresses) if isinstance(a, str) and _is_dialable(a)]
    return texts[-MAX_CACHED_ADDRESSES:]


def _write_cache(path: Path | None, addresses: list[str]) -> None:
    """Replaces the file of addresses as a whole; a failed write is only logged."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, addresses)
    except OSError as error:
        logger.warning("peer cache was not written", extra={"path": str(path), "error": str(error)})
