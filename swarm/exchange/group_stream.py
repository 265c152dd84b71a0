"""What a node gives to its peers: its log of groups as streams, single groups by digest, and weights (`weight_server`).

Invariant: a group is sent only after it was stored and is known to be worth sending; nobody gets what they made or
sent us themselves, nor what is older than anyone may use, nor groups without signal unless they ask for them.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.config import ReplayConfig
from swarm.errors import NotHeld
from swarm.flow import Signal
from swarm.interfaces import GroupStore, StreamItem
from swarm.types import (
    Credit,
    Cursor,
    Digest,
    NodeId,
    PolicyVersion,
    ScoredGroup,
    SealedGroup,
    SealedManifest,
    StreamFilter,
    short,
)
from swarm.weight_sync.weight_server import WeightServer

logger = logging.getLogger(__name__)

SUBSCRIBE_BATCH = 32  # log entries read from the store at a time


@dataclass(slots=True)
class _Fresh:
    """What decides to whom a stored group is worth sending."""

    producer: NodeId
    policy_id: str
    via: NodeId  # who sent it to us; ourselves for our own groups
    oldest_step: int
    has_signal: bool


class GroupStreams:
    """Implements `ExchangeHandler` over a node's store.

    Args:
        node_id: our own.
        store: where the groups are.
        config: bounds of what is remembered and of the age of what is sent.
        head_of: newest known head of a lineage, ours included.
        require_welcome: raises Unavailable for a peer that gets nothing now.
        weight_server: the weights.
    """

    def __init__(
        self,
        node_id: NodeId,
        store: GroupStore,
        config: ReplayConfig,
        head_of: Callable[[NodeId], PolicyVersion | None],
        require_welcome: Callable[[NodeId], None],
        weight_server: WeightServer,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._config = config
        self._head_of = head_of
        self._require_welcome = require_welcome
        self._weight_server = weight_server
        self._grew = Signal()  # what relaying streams wait for
        self._own_grew = Signal()  # what all other streams wait for
        self._fresh: dict[Digest, _Fresh] = {}  # of the newest groups in the log
        self._own_steps: dict[Digest, int] = {}  # oldest step of those of them that are ours
        self._arriving: Counter[Digest] = Counter()  # on their way through the door
        self._num_putting = 0
        self._newest: _Fresh | None = None  # what was offered last; None: whoever waits has to look again
        self.log_head = Cursor()  # newest entry of the store's log
        self.bytes_sent = 0  # sealed groups to peers, since the process started

    # --- told by the agent -----------------------------------------------------------------------

    async def restore(self, groups: Sequence[ScoredGroup]) -> None:
        """After a restart: what is in the store is there to be sent."""
        for scored in groups:
            self._remember(scored, via=self._node_id)
        await self.read_head()

    async def read_head(self) -> None:
        """The log may have grown."""
        self.log_head = await self._store.head()

    @contextmanager
    def putting(self) -> Generator[None]:
        """While one of our groups is stored: streams that see it already wait for `offer`."""
        self._num_putting += 1
        try:
            yield
        finally:
            self._num_putting -= 1

    @contextmanager
    def arriving(self, digest: Digest) -> Generator[None]:
        """While a foreign group passes the door: streams that see it already wait for `offer`."""
        self._arriving[digest] += 1
        try:
            yield
        finally:
            self._arriving[digest] -= 1
            if not self._arriving[digest]:
                del self._arriving[digest]

    def offer(self, scored: ScoredGroup, via: NodeId) -> None:
        """A stored group may go out to whom it is worth sending.

        Args:
            scored: the group.
            via: who sent it to us; ourselves for our own.
        """
        self._newest = self._remember(scored, via)
        self._grew.fire()
        if scored.is_made_here:
            self._own_grew.fire()

    def wake(self) -> None:
        """Every stream looks again whether its peer is still welcome."""
        self._newest = None
        self._grew.fire()
        self._own_grew.fire()

    @property
    def oldest_own_step(self) -> int:
        """Of our own groups that are remembered; 0 without any."""
        return min(self._own_steps.values(), default=0)

    # --- asked by peers: ExchangeHandler ---------------------------------------------------------

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """Own groups after `cursor`, then live ones; notices of other nodes' groups where they are wanted.

        Raises:
            Unavailable: the peer's standing is below the floor; also in the middle of a stream.
        """
        logger.debug(
            "peer subscribed", extra={"peer": short(peer), "relay": wanted.relay, "silent": wanted.zero_variance}
        )
        grew = self._grew if wanted.relay else self._own_grew
        while True:
            self._require_welcome(peer)
            newest = self.log_head
            entries: list[tuple[Cursor, SealedGroup]] = []
            if cursor != newest:
                entries = await self._store.since(cursor, SUBSCRIBE_BATCH, own_only=not wanted.relay)
            for position, sealed in entries:
                if self._is_settling(sealed):
                    await grew.wait()
                    break
                cursor = position
                fresh = self._fresh.get(sealed.digest)
                if fresh is None or not self._is_worth_sending(fresh, peer, wanted):
                    continue
                is_own = sealed.producer == self._node_id
                self.bytes_sent += sealed.size_bytes if is_own else 0
                yield StreamItem(
                    cursor=cursor,
                    digest=sealed.digest,
                    size_bytes=sealed.size_bytes,
                    sealed=sealed if is_own else None,
                )
            if not entries:
                cursor = newest  # what lies between is not for this peer
                if self.log_head == newest:
                    await grew.wait(lambda: self._is_news(peer, wanted))

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """A held group, ours or another node's. Raises NotHeld; Unavailable for a peer that is not welcome."""
        self._require_welcome(peer)
        sealed = await self._store.get(digest)
        if sealed is None:
            raise NotHeld(f"group {short(digest)} is not held")
        self.bytes_sent += sealed.size_bytes
        return sealed

    def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Held manifests of a lineage, then new ones, and leave to make groups for ours: see `Holding.watch`."""
        return self._weight_server.watch(peer, policy_id, window)

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """A held chunk of weights. Raises NotHeld; Unavailable for a peer that is not welcome."""
        return await self._weight_server.chunk(peer, digest)

    # --- inside ----------------------------------------------------------------------------------

    def _remember(self, scored: ScoredGroup, via: NodeId) -> _Fresh:
        fresh = _Fresh(scored.group.producer, scored.group.policy_id, via, scored.group.oldest_step, scored.has_signal)
        self._fresh[scored.digest] = fresh
        if fresh.producer == self._node_id:
            self._own_steps[scored.digest] = fresh.oldest_step
        while len(self._fresh) > self._config.max_groups:
            oldest = next(iter(self._fresh))
            del self._fresh[oldest]
            self._own_steps.pop(oldest, None)
        return fresh

    def _is_settling(self, sealed: SealedGroup) -> bool:
        """In the store, but its put or receive has not come back yet to say what it is worth."""
        if sealed.digest in self._fresh:
            return False
        return self._num_putting > 0 if sealed.producer == self._node_id else sealed.digest in self._arriving

    def _is_news(self, peer: NodeId, wanted: StreamFilter) -> bool:
        """Whether a stream that sent all it could has to look again; it is not woken for what its peer will not get."""
        return self._newest is None or self._is_worth_sending(self._newest, peer, wanted)

    def _is_worth_sending(self, fresh: _Fresh, peer: NodeId, wanted: StreamFilter) -> bool:
        """Not what the peer made or sent us itself, nor what is older than anyone may use, nor what nobody can learn
        from unless that is wanted.

        The trainer whose policy made one of ours gets it in any case: it gave leave for it, and waits for it.
        """
        if peer == fresh.producer or peer == fresh.via:
            return False
        if peer == fresh.policy_id and fresh.producer == self._node_id:
            return True
        if not (fresh.has_signal or wanted.zero_variance):
            return False
        head = self._head_of(fresh.policy_id)
        return head is None or head.step - fresh.oldest_step <= self._config.max_age_steps
