"""Streams of groups to peers, single groups by digest, and (through `WeightServer`) weights.

Invariant: a group is sent only after it was stored and is known to be worth sending. A peer does not get groups that it
made or sent us, nor groups too old for any node, nor zero-variance groups unless it asks for them; but a trainer gets
every group that we made with its policy. Peers that give groups come first (`send_order.py`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from swarm.errors import NotHeld
from swarm.exchange.novelty import commitment_of
from swarm.exchange.staleness import age_steps
from swarm.flow import Signal
from swarm.interfaces import GroupStore, StreamItem
from swarm.node_context import NodeContext
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.peers.send_order import SendOrder, Stream
from swarm.types import (
    Credit,
    Cursor,
    Digest,
    NodeId,
    ScoredGroup,
    SealedGroup,
    SealedManifest,
    StreamFilter,
    short,
)
from swarm.weight_sync.weight_server import WeightServer

logger = logging.getLogger(__name__)

SUBSCRIBE_BATCH = 32  # log entries read from the store at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class _SendInfo:
    """Facts about a stored group that decide to which peers this node sends the group."""

    producer: NodeId
    policy_id: NodeId
    via: NodeId  # the peer that sent it to us; ourselves for our own groups
    oldest_step: int  # of the policy that made its oldest token
    newest_step: int
    has_signal: bool
    has_turn_signal: bool
    stays: bool  # of an environment whose episodes never leave this node
    commitment: Digest


@dataclass(eq=False, repr=False)
class GroupStreams:
    """Implements `ExchangeHandler` over a node's store."""

    _context: NodeContext
    _store: GroupStore
    _peers: Peers  # newest known head of each lineage, ours included
    _reputation: Reputation  # a peer below the floor gets nothing
    _weight_server: WeightServer  # answers for weights
    _origin_of: Callable[[NodeId], str]  # a peer's party or subnet; empty: not known

    def __post_init__(self) -> None:
        self._order = SendOrder(self._reputation, self._context.clock, self._origin_of)
        self._node_id = self._context.node_id
        self._config = self._context.config.replay
        self._own_environments = self._context.config.own_environments
        self._grew = Signal()  # relaying streams wait for it
        self._own_grew = Signal()  # all other streams wait for it
        self._known: dict[Digest, _SendInfo] = {}  # the newest groups in the log
        self._own_steps: dict[Digest, int] = {}  # of the groups in `_known` that are ours
        self._admitting: Counter[Digest] = Counter()  # under admission
        self._num_putting = 0
        self._open = set[Stream]()
        self._behind = set[Stream]()  # open streams that a drain waits for
        self._caught_up = Signal()  # fires when one of them has caught up
        self._newest: _SendInfo | None = None  # the group offered last; None: every stream has to look again
        self.log_head = Cursor()  # newest entry of the store's log
        self.bytes_sent = 0  # sealed groups to peers, since the process started

    @property
    def readers(self) -> set[NodeId]:
        """Peers that stream groups from this node now."""
        return {stream.peer for stream in self._open}

    # --- called by the agent ---------------------------------------------------------------------

    async def restore(self, groups: Sequence[ScoredGroup]) -> None:
        """Makes the stored groups available again after a restart. `groups`: oldest first."""
        for scored in groups:
            self._remember(scored, via=self._node_id)
        await self.read_head()

    async def read_head(self) -> None:
        """Updates `log_head` from the store."""
        self.log_head = await self._store.head()

    @contextmanager
    def putting(self) -> Generator[None]:
        """Marks one of our groups as being stored while the block runs; a stream that meets it waits for `offer`."""
        self._num_putting += 1
        try:
            yield
        finally:
            self._num_putting -= 1

    @contextmanager
    def admitting(self, digest: Digest) -> Generator[None]:
        """Marks a peer's group as being admitted while the block runs; a stream that meets it waits for `offer`."""
        self._admitting[digest] += 1
        try:
            yield
        finally:
            self._admitting[digest] -= 1
            if not self._admitting[digest]:
                del self._admitting[digest]

    def offer(self, scored: ScoredGroup, via: NodeId) -> None:
        """Offers a stored group to all streams. `via`: the peer that sent the group to us; ourselves for our own."""
        self._newest = self._remember(scored, via)
        self._grew.fire()
        if scored.is_made_here:
            self._own_grew.fire()

    def is_giver(self, peer: NodeId) -> bool:
        """True if the peer's reputation reaches GIVER_SCORE; see `SendOrder.is_giver`."""
        return self._order.is_giver(peer)

    def wake(self) -> None:
        """Makes every stream check again that its peer is still allowed."""
        self._newest = None
        self._grew.fire()
        self._own_grew.fire()

    async def drain(self, limit_s: float) -> None:
        """Waits until every open stream has sent its peer all groups, `limit_s` at most: for a node that leaves."""
        self._behind = set(self._open)
        self.wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._caught_up.until(lambda: not self._behind)

    @property
    def oldest_own_step(self) -> int:
        """Oldest policy step of our own remembered groups; 0 if there are none."""
        return min(self._own_steps.values(), default=0)

    # --- asked by peers: ExchangeHandler, whose docstrings hold ------------------------------------

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """Yields own groups after `cursor`, then new ones as they come; on request, notices and commitments, too.

        Raises:
            Unavailable: the peer's reputation is below the floor; also in the middle of a stream.
        """
        extra = {"peer": short(peer), "relay": wanted.relay, "zero_variance": wanted.wants_zero_variance}
        logger.debug("peer subscribed", extra=extra)
        self._peers.record_call(peer)
        grew = self._grew if wanted.relay else self._own_grew
        with self._order.stream(peer) as stream, self._counted(stream):
            while True:
                self._reputation.require_allowed(peer)
                newest = self.log_head
                entries: list[tuple[Cursor, SealedGroup]] = []
                if cursor != newest:
                    entries = await self._store.since(cursor, SUBSCRIBE_BATCH, own_only=not wanted.relay)
                    ahead = self._own_commitments(entries, peer, wanted) if wanted.wants_commitments else ()
                    if ahead:  # before the first body: a copier commits later
                        yield StreamItem(cursor=cursor, digest=b"", size_bytes=0, sealed=None, commitments=ahead)
                for position, sealed in entries:
                    if self._is_settling(sealed):
                        self._order.has_all(stream)
                        await grew.wait()
                        break
                    cursor = position
                    info = self._known.get(sealed.digest)
                    if info is None or not self._is_worth_sending(info, peer, wanted):
                        continue
                    is_own = sealed.producer == self._node_id
                    self.bytes_sent += sealed.size_bytes if is_own else 0
                    item = StreamItem(
                        cursor=cursor,
                        digest=sealed.digest,
                        size_bytes=sealed.size_bytes,
                        sealed=sealed if is_own else None,
                        commitments=() if is_own or not wanted.wants_commitments else (info.commitment,),
                        producer=sealed.producer,
                    )
                    if not is_own:
                        yield item
                        continue
                    is_first = peer == info.policy_id or self._order.is_giver(peer)  # its trainer waits for it
                    if not is_first:
                        await self._order.turn()
                    with self._order.item(stream, is_first=is_first):
                        yield item
                if not entries:
                    cursor = newest  # the entries between are not for this peer
                    if self.log_head == newest:
                        self._order.has_all(stream)
                        self._note_caught_up(stream)
                        await grew.wait(lambda: self._is_news(peer, wanted))

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """Returns a held group that may leave this node. Raises NotHeld; Unavailable for a peer of low reputation."""
        self._reputation.require_allowed(peer)
        info = self._known.get(digest)  # a forgotten group may be one that has to stay
        sealed = None if info is None or info.stays else await self._store.get(digest)
        if sealed is None:
            raise NotHeld(f"group {short(digest)} is not held")
        if not self._order.is_giver(peer):
            await self._order.turn()
        self.bytes_sent += sealed.size_bytes
        return sealed

    def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        self._peers.record_call(peer)
        return self._weight_server.watch(peer, policy_id, window)

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        return await self._weight_server.chunk(peer, digest)

    # --- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _counted(self, stream: Stream) -> Generator[None]:
        self._open.add(stream)
        try:
            yield
        finally:
            self._open.discard(stream)
            self._note_caught_up(stream)

    def _note_caught_up(self, stream: Stream) -> None:
        if stream in self._behind:
            self._behind.discard(stream)
            self._caught_up.fire()

    def _remember(self, scored: ScoredGroup, via: NodeId) -> _SendInfo:
        group = scored.group
        info = _SendInfo(
            producer=group.producer,
            policy_id=group.policy_id,
            via=via,
            oldest_step=group.oldest_step,
            newest_step=group.newest_step,
            has_signal=scored.has_signal,
            has_turn_signal=scored.has_turn_signal,
            stays=group.env in self._own_environments,
            commitment=commitment_of(group),
        )
        self._known[scored.digest] = info
        if group.producer == self._node_id:
            self._own_steps[scored.digest] = info.oldest_step
        while len(self._known) > self._config.max_groups:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._own_steps.pop(oldest, None)
        return info

    def _own_commitments(
        self, entries: Sequence[tuple[Cursor, SealedGroup]], peer: NodeId, wanted: StreamFilter
    ) -> tuple[Digest, ...]:
        known = [self._known.get(sealed.digest) for _, sealed in entries if sealed.producer == self._node_id]
        return tuple(info.commitment for info in known if info and self._is_worth_sending(info, peer, wanted))

    def _is_settling(self, sealed: SealedGroup) -> bool:
        """True if the group is in the store, but its put or admission has not returned yet."""
        if sealed.digest in self._known:
            return False
        return self._num_putting > 0 if sealed.producer == self._node_id else sealed.digest in self._admitting

    def _is_news(self, peer: NodeId, wanted: StreamFilter) -> bool:
        """True if a stream that sent everything must check again, since the newest group may be for its peer."""
        return self._newest is None or self._is_worth_sending(self._newest, peer, wanted)

    def _is_worth_sending(self, info: _SendInfo, peer: NodeId, wanted: StreamFilter) -> bool:
        """True if the module's invariant lets a group go to a peer."""
        if info.stays or peer == info.producer or peer == info.via:
            return False
        if peer == info.policy_id and info.producer == self._node_id:
            return True
        has_signal = info.has_signal or (wanted.wants_turn_signal and info.has_turn_signal)
        if not (has_signal or wanted.wants_zero_variance):
            return False
        head = self._peers.head_of(info.policy_id)
        return age_steps(info, head) <= self._config.max_age_steps
