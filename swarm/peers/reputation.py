"""Reputation of peers: a score that decays to 0, and a quota of groups per minute.

Invariant: only content that a key provably signed changes the score of that key's owner; content that anybody
could have made is charged to the peer that sent it. Memory is bounded by `max_peers`.
"""

import contextlib
import heapq
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.flow import BoundedTable, TokenBucket
from swarm.identity import is_hex_digest
from swarm.peers.quotas import GROUPS_PER_MINUTE
from swarm.process import write_json
from swarm.read_files import read_json
from swarm.types import NodeId, RefusalReason, short

logger = logging.getLogger(__name__)

REPUTATION: Final = "reputation.json"  # in the node's directory
MAX_REMEMBERED: Final = 1024  # peers in it
_FORGOTTEN: Final = -0.5  # above it a peer is not worth remembering
_MAX_FILE_BYTES: Final = 256 * 1024

FLOOR: Final = -10.0  # below it a peer is refused without any work
_WORST: Final = -20.0  # one half-life of good behaviour leads back to the floor
_BEST: Final = 4.0  # credit that a peer can save up
_GOOD: Final = 0.1  # of an admitted group
_RELAYED_SHARE: Final = 0.25  # of the cost, for a relay that passed on what its own admission should have refused
_KILLER_COST: Final = 8.0  # an admitted group that no learner survives
_EVICTION_SCAN: Final = 64

# Reasons that anyone can provoke in anyone's name: charged to the sender.
UNPROVEN: Final = frozenset(
    {
        RefusalReason.TOO_LARGE,
        RefusalReason.WRONG_SIGNATURE,
        RefusalReason.WRONG_DIGEST,
        RefusalReason.FORGED_PRODUCER,
    }
)

# What a refusal costs. Reasons not listed are innocent: too old, duplicate, no room, over quota,
# a task that other settings do not have, ...
COSTS: Final[Mapping[RefusalReason, float]] = MappingProxyType(
    {
        RefusalReason.TOO_LARGE: 1.0,
        RefusalReason.MALFORMED: 4.0,
        RefusalReason.WRONG_SIGNATURE: 4.0,
        RefusalReason.WRONG_DIGEST: 4.0,
        RefusalReason.FORGED_PRODUCER: 4.0,
        RefusalReason.WRONG_GROUP_SIZE: 1.0,
        RefusalReason.HELD_OUT: 2.0,
        RefusalReason.WRONG_PROMPT: 4.0,
        RefusalReason.WRONG_EPISODE: 4.0,
        RefusalReason.TEXT_MISMATCH: 4.0,
        RefusalReason.BAD_TOKENS: 4.0,
        RefusalReason.BAD_LOGPROBS: 4.0,
        RefusalReason.BAD_SAMPLING: 1.0,
        RefusalReason.BAD_VERSION: 2.0,
        RefusalReason.FALSE_REWARD: 4.0,
        RefusalReason.VERIFIER_FAILED: 2.0,
        RefusalReason.TOO_MANY_ITEMS: 4.0,
    }
)

# Wrong whatever a node's environments, tokenizer and limits are: only for these a relay has its share. Its admission
# passes what it cannot compare: claims of another version, tasks that only others hold out, texts that it cuts.
_RELAYED: Final = frozenset({RefusalReason.MALFORMED, RefusalReason.BAD_LOGPROBS, RefusalReason.TOO_MANY_ITEMS})


@dataclass(slots=True)
class _Peer:
    score: float  # at `at_s`, monotonic
    at_s: float
    quota: TokenBucket  # groups that may still be sent


class Reputation:
    """Score and quota of the peers seen lately.

    Example:
        reputation = Reputation(clock)
        if not reputation.is_allowed(peer) or not reputation.try_take(peer): ...
        reputation.record_good(peer)
    """

    def __init__(
        self,
        clock: Clock,
        groups_per_minute: int = GROUPS_PER_MINUTE,
        half_life_s: float = 300.0,
        max_peers: int = 4096,
        is_denied: Callable[[NodeId], bool] = lambda peer: False,
    ) -> None:
        """Creates a table without any peer.

        Args:
            is_denied: returns True for a peer that the run does not admit (any more), whatever its score.
        """
        self._is_denied = is_denied
        assert groups_per_minute > 0 and half_life_s > 0 and max_peers > 0
        self._clock = clock
        self._rate_per_s = groups_per_minute / 60.0
        self._burst = float(max(1, groups_per_minute))  # a peer that reconnects may deliver a minute's worth at once
        self._half_life_s = half_life_s
        self._max_peers = max_peers
        self._peers: OrderedDict[NodeId, _Peer] = OrderedDict()
        self._proven = BoundedTable[NodeId, None](max_peers)  # false by their own signatures

    def score(self, peer: NodeId) -> float:
        """Present score of a peer: 0 if unknown, refused below FLOOR; halves with every half-life."""
        known = self._peers.get(peer)
        if known is None:
            return 0.0
        elapsed_s = self._clock.monotonic_s() - known.at_s
        return known.score * 0.5 ** (elapsed_s / self._half_life_s)

    def is_allowed(self, peer: NodeId) -> bool:
        """True if this node takes groups from a peer and serves it: not denied, not condemned, score >= FLOOR."""
        if peer in self._proven or self._is_denied(peer):
            return False
        known = self._peers.get(peer)
        # The stored score comes first, as it is cheap: a low one only rises by itself.
        return known is None or known.score >= FLOOR or self.score(peer) >= FLOOR

    def require_allowed(self, peer: NodeId) -> None:
        """Raises Unavailable if the peer is not allowed: it is denied or condemned, or its score is below FLOOR."""
        if self._is_denied(peer):
            raise Unavailable(f"the run does not admit {short(peer)} any more; ask its operator")
        if not self.is_allowed(peer):
            raise Unavailable(f"the reputation of {short(peer)} is below the floor of {FLOOR}; it decays with time")

    def condemn(self, peer: NodeId) -> None:
        """Excludes a peer whose own signatures contradict each other; no time ends that."""
        self._proven[peer] = None

    def try_take(self, peer: NodeId) -> bool:
        """Takes one group out of the peer's quota; returns False if the quota is used up."""
        return self._touch(peer).quota.try_take(self._clock.monotonic_s())

    def record_good(self, producer: NodeId) -> None:
        """Credits the producer of an admitted group."""
        entry = self._touch(producer)
        entry.score = min(_BEST, entry.score + _GOOD)

    def record_refused(self, reason: RefusalReason, via: NodeId, producer: NodeId | None) -> None:
        """Charges a refused group to the peer to blame: its producer, or its sender where the producer proves nothing.

        Args:
            reason: why the group was refused; most reasons cost nothing.
            via: the authenticated peer that sent it.
            producer: the peer that signed it; None if the signature does not hold or was not checked.
        """
        cost = COSTS.get(reason, 0.0)
        if cost == 0.0:
            return
        if producer is None or reason in UNPROVEN:
            self._charge(via, cost)
            return
        self._charge(producer, cost)
        if via != producer and reason in _RELAYED:
            self._charge(via, cost * _RELAYED_SHARE)

    def record_given_up(self, producer: NodeId) -> None:
        """Charges the producer of a group that ended the learner's process; the second group leads below the floor."""
        self._charge(producer, _KILLER_COST)

    def __len__(self) -> int:
        return len(self._peers)

    # --- over a restart --------------------------------------------------------------------------

    def to_remember(self) -> dict[NodeId, tuple[float, float]]:
        """Score and wall clock of the peers with a bad score, the worst first, at most MAX_REMEMBERED."""
        scores = ((self.score(peer), peer) for peer in self._peers)
        worst = heapq.nsmallest(MAX_REMEMBERED, ((score, peer) for score, peer in scores if score < _FORGOTTEN))
        now_s = self._clock.now_s()
        return {peer: (round(score, 3), now_s) for score, peer in worst}

    def restore(self, path: Path) -> None:
        """Restores the saved scores, decayed since (blocking); does nothing if the file is missing or unreadable."""
        now_s = self._clock.now_s()
        for peer, score, at_s in _read(path):
            elapsed_s = max(0.0, now_s - at_s)  # a clock that was set back forgives nothing
            entry = self._touch(peer)
            entry.score = max(_WORST, min(entry.score, score * 0.5 ** (elapsed_s / self._half_life_s)))

    def _charge(self, peer: NodeId, cost: float) -> None:
        entry = self._touch(peer)
        entry.score = max(_WORST, entry.score - cost)

    def _touch(self, peer: NodeId) -> _Peer:
        """The peer's entry, added if missing, with its score decayed until now, at the young end of the table."""
        now_s = self._clock.monotonic_s()
        entry = self._peers.get(peer)
        if entry is None:
            entry = _Peer(0.0, now_s, TokenBucket(self._rate_per_s, self._burst, now_s))
            self._peers[peer] = entry
            if len(self._peers) > self._max_peers:
                self._evict()
            return entry
        entry.score = self.score(peer)
        entry.at_s = now_s
        self._peers.move_to_end(peer)
        return entry

    def _evict(self) -> None:
        """Drops an old entry, an innocent one if possible: fresh identities must not clear the score of bad ones."""
        oldest = list(itertools.islice(self._peers, min(_EVICTION_SCAN, len(self._peers) - 1)))
        victim = max(oldest, key=lambda peer: min(self.score(peer), 0.0), default=None)
        if victim is not None:
            del self._peers[victim]


def save_reputation(path: Path, peers: Mapping[NodeId, tuple[float, float]]) -> None:
    """Replaces the reputation file (blocking); a failed write is only logged."""
    try:
        write_json(path, {"peers": dict(peers)})
    except OSError as error:
        logger.warning("reputation was not written", extra={"path": str(path), "error": str(error)})


def _read(path: Path) -> list[tuple[NodeId, float, float]]:
    """Peer, score and wall clock of each valid entry of the file; [] if the file is missing or unreadable."""
    try:
        entries = list(cast("dict[str, Any]", read_json(path, _MAX_FILE_BYTES)["peers"]).items())[:MAX_REMEMBERED]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning(
            "reputation could not be read, nobody is remembered", extra={"path": str(path), "error": str(error)}
        )
        return []
    found: list[tuple[NodeId, float, float]] = []
    for peer, value in entries:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            score, at_s = (float(number) for number in value)
            if is_hex_digest(peer) and math.isfinite(at_s) and score < 0:
                found.append((peer, score, at_s))
    return found
