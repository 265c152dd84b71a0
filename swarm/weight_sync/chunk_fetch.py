"""Fetching chunks of weights: the choice of a source by its measured rate, hedged by the trainer itself (the origin).

Invariant: every table is bounded. A source is banned for BANNED_S after a forgery, for RESTING_S after MAX_FAILURES.
A source of unknown rate gets one chunk at a time and ranks below an idle origin of known rate. A failing origin stays
connected.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from swarm.clock import Clock
from swarm.errors import Forged, NotHeld, StorageFull, Unavailable
from swarm.flow import BoundedTable, RunningMean, Signal
from swarm.interfaces import PeerClient
from swarm.types import Digest, JsonDict, NodeId, short
from swarm.weight_sync.update_planner import ChunkQueue
from swarm.weights.payload import CHUNK_BYTES

logger = logging.getLogger(__name__)

BANNED_S: Final = 1800.0  # after something forged
RESTING_S: Final = 120.0  # after MAX_FAILURES in a row
MAX_FAILURES: Final = 3
TIMEOUT_S: Final = 30.0  # for a chunk from a source without failures
HEDGE_S: Final = 3.0  # after which the origin is asked too
MAX_PER_SOURCE: Final = 3  # concurrent chunks of one source
ORIGIN_SHARE: Final = 0.5  # a source over half as fast as the origin is preferred: the origin serves everybody
MAX_SCORES: Final = 256
RETRY_S: Final = 1.0  # between two attempts at the origin
STORAGE_RETRY_S: Final = 5.0  # between two attempts on a full disk
_MEMORY: Final = 0.7  # weight of the old value in the running mean of the rate
_FAILED: Final = 0.25  # factor of the rate after a failure
_UNKNOWN_BYTES_PER_S: Final = 1e8  # of a source that was never asked, while the origin's rate is unknown too
_UNKNOWN_SHARE: Final = 0.8 * ORIGIN_SHARE  # of the origin's rate: asked once the origin is sending a chunk
_LONGEST_PATIENCE: Final = 16.0
_TIMELY: Final = 0.25  # of the timeout; a chunk within it halves the source's patience


class Outcome(StrEnum):
    """Result of a request for one chunk."""

    SERVED = "served"  # the right chunk came
    LACKED = "lacked"  # the source does not hold it
    FAILED = "failed"  # nothing complete came in time
    FORGED = "forged"  # another content came
    CANCELLED = "cancelled"  # no longer wanted, or not storable: does not count against the source


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """A request to one source for one chunk."""

    peer: NodeId
    digest: Digest
    at_s: float  # monotonic


@dataclass(slots=True)
class SourceScore:
    """Record of one source, over all its connections."""

    bytes_per_s: RunningMean = field(default_factory=lambda: RunningMean(_MEMORY))
    num_chunks: int = 0
    num_bytes: int = 0
    num_failures: int = 0
    num_in_row: int = 0  # failures since it last served
    failed_at_s: float = -math.inf
    patience: float = 1.0  # factor of its timeouts


@dataclass(slots=True)
class _Connection:
    is_origin: bool
    held: set[Digest] = field(default_factory=set[Digest])  # chunks of the manifests it named; the origin has all
    lacking: set[Digest] = field(default_factory=set[Digest])  # chunks that it answered it lacks
    num_asked: int = 0  # requests under way
    num_failed: int = 0  # in a row


class ChunkSources:
    """The connected sources of one lineage, ranked by their rates. Pure bookkeeping, single-threaded.

    Example:
        sources.connect(peer, is_origin=False)
        sources.add_held(peer, manifest.chunks)
        request = sources.begin(peer, digest)
        sources.end(request, Outcome.SERVED, num_bytes=len(data), seconds=0.2)
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._connections: dict[NodeId, _Connection] = {}
        self._banned_until_s = BoundedTable[NodeId, float](MAX_SCORES)
        self.scores = BoundedTable[NodeId, SourceScore](MAX_SCORES)

    # --- connections -------------------------------------------------------------------------------

    def connect(self, peer: NodeId, *, is_origin: bool) -> None:
        """Records a new connection."""
        self._connections[peer] = _Connection(is_origin)

    def disconnect(self, peer: NodeId) -> None:
        """Records the end of a connection."""
        self._connections.pop(peer, None)

    def add_held(self, peer: NodeId, chunks: Iterable[Digest]) -> None:
        """Records that a connected source holds the chunks of a manifest that it named."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.held.update(chunks)
            connection.lacking.difference_update(chunks)

    def keep_only(self, chunks: set[Digest]) -> None:
        """Forgets which sources hold or lack any chunk outside this set."""
        for connection in self._connections.values():
            connection.held &= chunks
            connection.lacking &= chunks

    def is_banned(self, peer: NodeId) -> bool:
        """True while a source is banned after a forgery or repeated failures."""
        return self._banned_until_s.get(peer, 0.0) > self._clock.monotonic_s()

    def has_served(self, peer: NodeId) -> bool:
        """True if a source has served a chunk and has not failed since."""
        score = self.scores.get(peer)
        return score is not None and score.num_chunks > 0 and score.num_in_row == 0

    def keeps_failing(self, peer: NodeId) -> bool:
        """True after MAX_FAILURES counted failures on this connection without a served chunk between them."""
        connection = self._connections.get(peer)
        return connection is not None and connection.num_failed >= MAX_FAILURES

    @property
    def connected(self) -> frozenset[NodeId]:
        """Ids of the connected sources."""
        return frozenset(self._connections)

    def status(self) -> JsonDict:
        """Bytes, failures and rate of each connected source."""
        scores = {peer: self.scores.get(peer) or SourceScore() for peer in sorted(self._connections)}
        return {
            peer: {"bytes": s.num_bytes, "failures": s.num_failures, "bytes_per_s": s.bytes_per_s.value or 0.0}
            for peer, s in scores.items()
        }

    # --- choice ------------------------------------------------------------------------------------

    @property
    def free(self) -> list[NodeId]:
        """Connected sources with room for one more request, best first."""
        ranks: list[tuple[float, NodeId]] = []
        for peer, connection in self._connections.items():
            rate = self._score(peer).bytes_per_s.value
            is_unknown = rate is None and not connection.is_origin
            if connection.num_asked < (1 if is_unknown else MAX_PER_SOURCE):
                share = ORIGIN_SHARE if connection.is_origin else 1.0
                rank = (self._guess() if rate is None else rate) * share / (1 + connection.num_asked)
                ranks.append((rank, peer))
        return [peer for _, peer in sorted(ranks, reverse=True)]

    def can_have(self, peer: NodeId, digest: Digest) -> bool:
        """True if a connected source may hold a chunk."""
        connection = self._connections[peer]
        return digest not in connection.lacking and (connection.is_origin or digest in connection.held)

    def is_obtainable(self, digest: Digest) -> bool:
        """True if any connected source may hold a chunk."""
        return any(self.can_have(peer, digest) for peer in self._connections)

    def timeout_s(self, peer: NodeId) -> float:
        """TIMEOUT_S, doubled by each failure (at most times _LONGEST_PATIENCE), halved again by each timely chunk."""
        return TIMEOUT_S * self._score(peer).patience

    def hedge_after_s(self, origin: NodeId) -> float:
        """Seconds until the origin is asked too: three times its time per chunk, between HEDGE_S and TIMEOUT_S."""
        rate = self._score(origin).bytes_per_s.value
        return HEDGE_S if not rate else min(max(HEDGE_S, 3 * CHUNK_BYTES / rate), TIMEOUT_S)

    def _guess(self) -> float:
        """Assumed rate of a source whose rate was never measured."""
        rates = [self._score(peer).bytes_per_s.value for peer, one in self._connections.items() if one.is_origin]
        return _UNKNOWN_BYTES_PER_S if not rates or rates[0] is None else _UNKNOWN_SHARE * rates[0]

    # --- results -----------------------------------------------------------------------------------

    def begin(self, peer: NodeId, digest: Digest) -> ChunkRequest:
        """Records the start of a request to a connected source; returns the request, to be passed to `end`."""
        self._connections[peer].num_asked += 1
        return ChunkRequest(peer, digest, self._clock.monotonic_s())

    def end(self, request: ChunkRequest, outcome: Outcome, *, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """Records the outcome of a request in its source's score."""
        peer, score, connection = request.peer, self._score(request.peer), self._connections.get(request.peer)
        if connection is not None:
            connection.num_asked = max(0, connection.num_asked - 1)
        if outcome is Outcome.SERVED:
            score.num_chunks, score.num_bytes, score.num_in_row = score.num_chunks + 1, score.num_bytes + num_bytes, 0
            if connection is not None:
                connection.num_failed = 0
            if seconds < _TIMELY * TIMEOUT_S * score.patience:
                score.patience = max(1.0, score.patience / 2)
            score.bytes_per_s.add(num_bytes / max(seconds, 1e-6))
        elif outcome is Outcome.LACKED and connection is not None:
            connection.held.discard(request.digest)
            connection.lacking.add(request.digest)
        elif outcome in (Outcome.FAILED, Outcome.FORGED):
            score.num_failures += 1
            if outcome is Outcome.FORGED:
                self._ban(peer, BANNED_S)
            if request.at_s >= score.failed_at_s:  # requests that were under way at a failure belong to it
                rate = score.bytes_per_s.value
                score.bytes_per_s.value = _FAILED * (self._guess() if rate is None else rate)
                score.patience = min(2 * score.patience, _LONGEST_PATIENCE)
                self._add_failure(peer, score)
                if connection is not None:
                    connection.num_failed += 1

    def record_unreachable(self, peer: NodeId) -> None:
        """Counts a failure of a source whose connection did not open or stayed silent."""
        self._add_failure(peer, self._score(peer))

    def record_forgery(self, peer: NodeId) -> None:
        """Bans a source for BANNED_S, since it sent a wrong manifest or nothing useful."""
        self._score(peer).num_failures += 1
        self._ban(peer, BANNED_S)

    def _add_failure(self, peer: NodeId, score: SourceScore) -> None:
        score.failed_at_s = self._clock.monotonic_s()
        score.num_in_row += 1
        if score.num_in_row >= MAX_FAILURES:
            self._ban(peer, RESTING_S)

    def _ban(self, peer: NodeId, seconds: float) -> None:
        until_s = max(self._clock.monotonic_s() + seconds, self._banned_until_s.get(peer, 0.0))
        self._banned_until_s[peer] = until_s

    def _score(self, peer: NodeId) -> SourceScore:
        score = self.scores.get(peer) or SourceScore()
        self.scores[peer] = score
        return score


@dataclass(frozen=True, eq=False, slots=True)
class _Pending:
    request: ChunkRequest
    client: PeerClient
    answer: asyncio.Future[bytes]


@dataclass(eq=False, repr=False, kw_only=True)
class ChunkFetcher:
    """Fetches the missing chunks of a plan, each from the best source, hedged by the origin."""

    sources: ChunkSources
    origin: Callable[[], NodeId]  # the trainer
    queue: Callable[[], ChunkQueue]  # missing chunks of the plan
    is_planned: Callable[[], bool]  # the plan is final enough to fetch for it
    store_chunk: Callable[[Digest, bytes], Awaitable[None]]  # Raises ValueError for a wrong chunk, StorageFull.
    on_lacked: Callable[[Digest], None]  # a source lacks a chunk
    changed: Signal  # fires when there may be more to fetch
    clock: Clock  # of measured rates

    def __post_init__(self) -> None:
        self._in_flight: set[Digest] = set()
        self.clients: dict[NodeId, PeerClient] = {}  # of the connected sources

    async def run(self) -> None:
        """Fetches one chunk after another until cancelled."""
        while True:
            await self.changed.until(lambda: self.next_chunk() is not None)
            wanted = self.next_chunk()
            if wanted is not None:
                await self._fetch(*wanted)

    def next_chunk(self) -> tuple[Digest, NodeId] | None:
        """The chunk to fetch next, and its source; None if there is nothing to fetch now."""
        if not self.is_planned():
            return None
        queue, first = self.queue(), dict[int, NodeId]()
        for peer in self.sources.free:  # best first: the best source of the chunk that is needed first wins
            at = queue.first(peer, partial(self._can_ask, peer))
            if at is not None:
                first.setdefault(at, peer)
        return (queue[min(first)], first[min(first)]) if first else None

    def _can_ask(self, peer: NodeId, digest: Digest) -> bool:
        return digest not in self._in_flight and self.sources.can_have(peer, digest)

    async def _fetch(self, digest: Digest, peer: NodeId) -> None:
        """Fetches a chunk from a source, after `hedge_after_s` also from the origin; the first valid answer wins."""
        origin = self.origin()
        self._in_flight.add(digest)
        pending = [self._ask(peer, digest)]
        hedge_s: float | None = self.sources.hedge_after_s(origin)
        try:
            while pending:
                answers = [one.answer for one in pending]
                done, _ = await asyncio.wait(answers, timeout=hedge_s, return_when=asyncio.FIRST_COMPLETED)
                hedge_s = None
                if done:
                    await self._settle(next(one for one in pending if one.answer in done), pending)
                elif peer != origin and origin in self.sources.connected:
                    pending.append(self._ask(origin, digest))
        finally:
            for one in pending:
                one.answer.cancel()
                self.sources.end(one.request, Outcome.CANCELLED)
            self._in_flight.discard(digest)
            if digest in self.queue():
                self.queue().rescan()  # it did not arrive
            self.changed.fire()

    def _ask(self, peer: NodeId, digest: Digest) -> _Pending:
        client = self.clients[peer]
        answer = asyncio.ensure_future(client.fetch_chunk(digest, self.sources.timeout_s(peer)))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the error as retrieved
        return _Pending(self.sources.begin(peer, digest), client, answer)

    async def _settle(self, one: _Pending, pending: list[_Pending]) -> None:
        """Stores the chunk in an answer and records the outcome; the first stored chunk ends the other requests."""
        request, num_bytes = one.request, 0
        seconds = self.clock.monotonic_s() - request.at_s
        try:
            data = one.answer.result()
            await self.store_chunk(request.digest, data)
            outcome, num_bytes = Outcome.SERVED, len(data)
        except NotHeld:
            outcome = Outcome.LACKED
        except (Forged, ValueError) as error:
            logger.error("a source sent a forged chunk", extra={"peer": short(request.peer), "error": str(error)})
            outcome = Outcome.FORGED
        except Unavailable as error:
            logger.info("a source did not send a chunk", extra={"peer": short(request.peer), "error": str(error)})
            outcome = Outcome.FAILED
        except StorageFull:
            outcome = Outcome.CANCELLED
        pending.remove(one)
        self.sources.end(request, outcome, num_bytes=num_bytes, seconds=seconds)
        if outcome is Outcome.LACKED:
            self.on_lacked(request.digest)
        elif outcome is Outcome.FAILED and request.peer == self.origin():
            await asyncio.sleep(RETRY_S)  # not disconnected: the connection also carries credit
        elif outcome in (Outcome.FAILED, Outcome.FORGED):
            await self._disconnect(one)
        else:
            if outcome is Outcome.CANCELLED:
                await asyncio.sleep(STORAGE_RETRY_S)
            await self._cancel_late(pending)

    async def _cancel_late(self, pending: list[_Pending]) -> None:
        """Cancels slower requests; each counts as a failure of its source, unless that source is the origin."""
        while pending:
            late = pending.pop()
            late.answer.cancel()
            if late.request.peer == self.origin():
                self.sources.end(late.request, Outcome.CANCELLED)
            else:
                logger.info("the trainer was faster than a source", extra={"peer": short(late.request.peer)})
                self.sources.end(late.request, Outcome.FAILED)
                await self._disconnect(late)

    async def _disconnect(self, one: _Pending) -> None:
        """Closes the connection of a request; the watcher of the source connects again later."""
        if self.clients.get(one.request.peer) is one.client:
            self.sources.disconnect(one.request.peer)
        await one.client.close()
