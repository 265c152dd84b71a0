"""Whom to ask for a chunk of weights: who holds it, how fast each holder was, and who is not asked again soon.

Invariant: every table is bounded, and one forged chunk costs a holder more than any number of slow ones. Pure
bookkeeping, single-threaded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.exchange.peers import keep_newest
from swarm.types import Digest, JsonDict, NodeId

BANNED_S: Final = 1800.0  # after something forged
MAX_PER_HOLDER: Final = 3  # chunks asked of one holder at a time
ORIGIN_SHARE: Final = 0.5  # a holder half as fast as the origin is asked first: the origin has everybody to serve
MAX_SCORES: Final = 256
_MEMORY: Final = 0.7  # share of the old figure in the running mean of the rate
_FAILED: Final = 0.25  # of the rate that is left after a failure
_UNKNOWN_BYTES_PER_S: Final = 1e8  # of a holder that was never asked: it gets its chance


@dataclass(slots=True)
class Score:
    """What is known of one holder, over all its connections."""

    bytes_per_s: float | None = None
    num_chunks: int = 0
    num_bytes: int = 0
    num_failures: int = 0


@dataclass(slots=True)
class _Connected:
    is_origin: bool
    held: set[Digest] = field(default_factory=set[Digest])  # of chunks that its manifests name; the origin has them all
    lacking: set[Digest] = field(default_factory=set[Digest])  # that it said it lacks
    num_asked: int = 0  # under way


class Holders:
    """The holders of one lineage that are connected, and what each of them was like.

    Example:
        holders.connect(peer, is_origin=False)
        holders.announced(peer, manifest.chunks)
        peer = holders.choose(digest)
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._connected: dict[NodeId, _Connected] = {}
        self._banned_until_s: dict[NodeId, float] = {}
        self.scores: dict[NodeId, Score] = {}

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
        """It forged something not long ago."""
        return self._banned_until_s.get(peer, 0.0) > self._clock.monotonic_s()

    @property
    def connected(self) -> frozenset[NodeId]:
        """Holders that can be asked now."""
        return frozenset(self._connected)

    def status(self) -> JsonDict:
        """Bytes, failures and rate of each connected holder."""
        found = {peer: self.scores.get(peer) or Score() for peer in sorted(self._connected)}
        return {
            peer: {"bytes": s.num_bytes, "failures": s.num_failures, "bytes_per_s": s.bytes_per_s or 0.0}
            for peer, s in found.items()
        }

    # --- whom to ask -------------------------------------------------------------------------------

    def choose(self, digest: Digest) -> NodeId | None:
        """The best holder to ask for a chunk now; None where each is busy, or none has it."""
        free = [
            (self._rank(peer, connected), peer)
            for peer, connected in self._connected.items()
            if connected.num_asked < MAX_PER_HOLDER and _can_have(connected, digest)
        ]
        return max(free)[1] if free else None

    def can_be_had(self, digest: Digest) -> bool:
        """Whether any connected holder may have a chunk, busy or not."""
        return any(_can_have(connected, digest) for connected in self._connected.values())

    def _rank(self, peer: NodeId, connected: _Connected) -> float:
        rate = self._score(peer).bytes_per_s
        rate = _UNKNOWN_BYTES_PER_S if rate is None else rate
        return rate * (ORIGIN_SHARE if connected.is_origin else 1.0) / (1 + connected.num_asked)

    # --- how it went ---------------------------------------------------------------------------------

    def asked(self, peer: NodeId) -> None:
        """A chunk is on its way from this holder."""
        self._connected[peer].num_asked += 1

    def served(self, peer: NodeId, num_bytes: int, seconds: float) -> None:
        """A whole and true chunk came."""
        score, rate = self._done(peer), num_bytes / max(seconds, 1e-6)
        score.num_chunks, score.num_bytes = score.num_chunks + 1, score.num_bytes + num_bytes
        before = score.bytes_per_s
        score.bytes_per_s = rate if before is None else _MEMORY * before + (1 - _MEMORY) * rate

    def lacked(self, peer: NodeId, digest: Digest) -> None:
        """It does not have it (any more)."""
        self._done(peer)
        connected = self._connected.get(peer)
        if connected is not None:
            connected.held.discard(digest)
            connected.lacking.add(digest)

    def failed(self, peer: NodeId) -> None:
        """Nothing whole came in time."""
        score = self._done(peer)
        score.num_failures += 1
        before = score.bytes_per_s
        score.bytes_per_s = _FAILED * (_UNKNOWN_BYTES_PER_S if before is None else before)

    def gave_up(self, peer: NodeId) -> None:
        """We do not want it any more, or could not keep it: nothing against the holder."""
        self._done(peer)

    def forged(self, peer: NodeId) -> None:
        """It sent what is not what it should be: it is not asked again for long. (The origin is; see `is_banned`.)"""
        self._score(peer).num_failures += 1
        keep_newest(self._banned_until_s, peer, self._clock.monotonic_s() + BANNED_S, MAX_SCORES)

    def _done(self, peer: NodeId) -> Score:
        connected = self._connected.get(peer)
        if connected is not None:
            connected.num_asked = max(0, connected.num_asked - 1)
        return self._score(peer)

    def _score(self, peer: NodeId) -> Score:
        score = self.scores.get(peer) or Score()
        keep_newest(self.scores, peer, score, MAX_SCORES)
        return score


def _can_have(connected: _Connected, digest: Digest) -> bool:
    if digest in connected.lacking:
        return False
    return connected.is_origin or digest in connected.held
