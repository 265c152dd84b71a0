"""Whom to ask for a chunk of weights: who holds it, how fast each holder was, and who is not asked again soon.

Invariant: every table is bounded, a holder that forges or keeps stalling is not asked for a while, and one of which
nothing is known gets one chunk, after an origin that is known to deliver. Pure bookkeeping, single-threaded.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable, RunningMean
from swarm.types import Digest, JsonDict, NodeId
from swarm.weights.chunks import CHUNK_BYTES

BANNED_S: Final = 1800.0  # after something forged
RESTING_S: Final = 120.0  # after MAX_FAILURES in a row
MAX_FAILURES: Final = 3
TIMEOUT_S: Final = 30.0  # of a chunk, from a holder that did not fail
HEDGE_S: Final = 3.0  # after which the origin is asked as well
MAX_PER_HOLDER: Final = 3  # chunks asked of one holder at a time
ORIGIN_SHARE: Final = 0.5  # a holder half as fast as the origin is asked first: the origin has everybody to serve
MAX_SCORES: Final = 256
_MEMORY: Final = 0.7  # share of the old figure in the running mean of the rate
_FAILED: Final = 0.25  # of the rate that is left after a failure
_UNKNOWN_BYTES_PER_S: Final = 1e8  # of a holder that was never asked, while nothing is known of the origin either
_UNKNOWN_SHARE: Final = 0.8 * ORIGIN_SHARE  # of the origin's rate: asked when the origin has a chunk to send already
_LONGEST_PATIENCE: Final = 16.0
_TIMELY: Final = 0.25  # of its timeout; a chunk that came within it needs less patience


@dataclass(slots=True)
class Score:
    """What is known of one holder, over all its connections."""

    bytes_per_s: RunningMean = field(default_factory=lambda: RunningMean(_MEMORY))
    num_chunks: int = 0
    num_bytes: int = 0
    num_failures: int = 0
    num_in_row: int = 0  # failures since it last served
    failed_at_s: float = -math.inf
    patience: float = 1.0  # timeouts are so much longer


@dataclass(slots=True)
class _Connected:
    is_origin: bool
    held: set[Digest] = field(default_factory=set[Digest])  # of chunks that its manifests name; the origin has them all
    lacking: set[Digest] = field(default_factory=set[Digest])  # that it said it lacks
    num_asked: int = 0  # under way


class ChunkSources:
    """The holders of one lineage that are connected, and what each of them was like.

    Example:
        holders.connect(peer, is_origin=False)
        holders.announced(peer, manifest.chunks)
        peer = next(peer for peer in holders.free if holders.can_have(peer, digest))
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._connected: dict[NodeId, _Connected] = {}
        self._banned_until_s = BoundedTable[NodeId, float](MAX_SCORES)
        self.scores = BoundedTable[NodeId, Score](MAX_SCORES)

    # --- who is there ------------------------------------------------------------------------------

    def connect(self, peer: NodeId, *, is_origin: bool) -> None:
        """A connection to a holder is open."""
        self._connected[peer] = _Connected(is_origin)

    def disconnect(self, peer: NodeId) -> None:
        """It is closed."""
        self._connected.pop(peer, None)

    def announced(self, peer: NodeId, chunks: Iterable[Digest]) -> None:
        """A holder named a manifest: it holds these."""
        connected = self._connected.get(peer)
        if connected is not None:
            connected.held.update(chunks)
            connected.lacking.difference_update(chunks)

    def keep_only(self, chunks: set[Digest]) -> None:
        """Forgets who holds what nobody needs any more."""
        for connected in self._connected.values():
            connected.held &= chunks
            connected.lacking &= chunks

    def is_banned(self, peer: NodeId) -> bool:
        """It forged something, or kept failing, not long ago."""
        return self._banned_until_s.get(peer, 0.0) > self._clock.monotonic_s()

    @property
    def connected(self) -> frozenset[NodeId]:
        """ChunkSources that can be asked now."""
        return frozenset(self._connected)

    def status(self) -> JsonDict:
        """Bytes, failures and rate of each connected holder."""
        found = {peer: self.scores.get(peer) or Score() for peer in sorted(self._connected)}
        return {
            peer: {"bytes": s.num_bytes, "failures": s.num_failures, "bytes_per_s": s.bytes_per_s.value or 0.0}
            for peer, s in found.items()
        }

    # --- whom to ask -------------------------------------------------------------------------------

    @property
    def free(self) -> list[NodeId]:
        """Connected holders that can be asked for something now, the best first."""
        free = [(peer, connected) for peer, connected in self._connected.items() if self._is_free(peer, connected)]
        return [peer for _, peer in sorted(((self._rank(*one), one[0]) for one in free), reverse=True)]

    def can_have(self, peer: NodeId, digest: Digest) -> bool:
        """Whether a connected holder may have a chunk."""
        return _can_have(self._connected[peer], digest)

    def timeout_s(self, peer: NodeId) -> float:
        """How long to wait for a chunk: longer after each one that did not come in time, for slow links."""
        return TIMEOUT_S * self._score(peer).patience

    def hedge_after_s(self, origin: NodeId) -> float:
        """How long a holder may take before the origin is asked as well; no less than the origin takes itself."""
        rate = self._score(origin).bytes_per_s.value
        return HEDGE_S if not rate else min(max(HEDGE_S, 3 * CHUNK_BYTES / rate), TIMEOUT_S)

    def has_served(self, peer: NodeId) -> bool:
        """Whether something came of it, and nothing failed since."""
        score = self.scores.get(peer)
        return score is not None and score.num_chunks > 0 and score.num_in_row == 0

    def can_be_had(self, digest: Digest) -> bool:
        """Whether any connected holder may have a chunk, busy or not."""
        return any(_can_have(connected, digest) for connected in self._connected.values())

    def _rank(self, peer: NodeId, connected: _Connected) -> float:
        rate = self._score(peer).bytes_per_s.value
        rate = self._guess() if rate is None else rate
        return rate * (ORIGIN_SHARE if connected.is_origin else 1.0) / (1 + connected.num_asked)

    def _is_free(self, peer: NodeId, connected: _Connected) -> bool:
        is_unknown = not connected.is_origin and self._score(peer).bytes_per_s.value is None
        return connected.num_asked < (1 if is_unknown else MAX_PER_HOLDER)

    def _guess(self) -> float:
        """Rate of a holder that was never asked."""
        rates = [
            self._score(peer).bytes_per_s.value for peer, connected in self._connected.items() if connected.is_origin
        ]
        return _UNKNOWN_BYTES_PER_S if not rates or rates[0] is None else _UNKNOWN_SHARE * rates[0]

    # --- how it went ---------------------------------------------------------------------------------

    def asked(self, peer: NodeId) -> float:
        """A chunk is on its way from this holder. Returns when it was asked, for `failed`."""
        self._connected[peer].num_asked += 1
        return self._clock.monotonic_s()

    def served(self, peer: NodeId, num_bytes: int, seconds: float) -> None:
        """A whole and true chunk came."""
        score, rate = self._done(peer), num_bytes / max(seconds, 1e-6)
        score.num_chunks, score.num_bytes, score.num_in_row = score.num_chunks + 1, score.num_bytes + num_bytes, 0
        if seconds < _TIMELY * TIMEOUT_S * score.patience:
            score.patience = max(1.0, score.patience / 2)
        score.bytes_per_s.add(rate)

    def lacked(self, peer: NodeId, digest: Digest) -> None:
        """It does not have it (any more)."""
        self._done(peer)
        connected = self._connected.get(peer)
        if connected is not None:
            connected.held.discard(digest)
            connected.lacking.add(digest)

    def failed(self, peer: NodeId, asked_at_s: float) -> None:
        """Nothing whole came in time. What was under way when it failed before counts as the same failure."""
        score = self._done(peer)
        score.num_failures += 1
        if asked_at_s < score.failed_at_s:
            return
        rate = score.bytes_per_s.value
        score.bytes_per_s.value = _FAILED * (self._guess() if rate is None else rate)
        score.patience = min(2 * score.patience, _LONGEST_PATIENCE)
        self._failed_again(peer, score)

    def unreachable(self, peer: NodeId) -> None:
        """A connection did not come about, or nothing came over it."""
        self._failed_again(peer, self._score(peer))

    def _failed_again(self, peer: NodeId, score: Score) -> None:
        score.failed_at_s = self._clock.monotonic_s()
        score.num_in_row += 1
        if score.num_in_row >= MAX_FAILURES:
            self._ban(peer, RESTING_S)

    def gave_up(self, peer: NodeId) -> None:
        """We do not want it any more, or could not keep it: nothing against the holder."""
        self._done(peer)

    def forged(self, peer: NodeId) -> None:
        """It sent what is not what it should be: it is not asked again for long. (The origin is; see `is_banned`.)"""
        self._score(peer).num_failures += 1
        self._ban(peer, BANNED_S)

    def _ban(self, peer: NodeId, seconds: float) -> None:
        until_s = max(self._clock.monotonic_s() + seconds, self._banned_until_s.get(peer, 0.0))
        self._banned_until_s[peer] = until_s

    def _done(self, peer: NodeId) -> Score:
        connected = self._connected.get(peer)
        if connected is not None:
            connected.num_asked = max(0, connected.num_asked - 1)
        return self._score(peer)

    def _score(self, peer: NodeId) -> Score:
        score = self.scores.get(peer) or Score()
        self.scores[peer] = score
        return score


def _can_have(connected: _Connected, digest: Digest) -> bool:
    if digest in connected.lacking:
        return False
    return connected.is_origin or digest in connected.held
