"""Clocks of other nodes, as stated at Hello, from which this node finds that its own clock is wrong.

Invariant: the only result is a sentence for the operator; no time of a group, an advert or this node is ever shifted.
Each party has one vote, and strangers vote only while no established peer does. More than half of the votes, and the
coordinator's if there is one, have to differ from our clock by more than peers accept, in the same direction.
"""

from collections import defaultdict
from statistics import median
from typing import Final, NamedTuple

from swarm.clock import CLOCK_SKEW_S, Clock
from swarm.flow import BoundedTable
from swarm.peers.parties import Parties
from swarm.types import NodeId

_MAX_PEERS: Final = 256
_FORGET_S: Final = 3600.0  # sessions are renewed sooner; a machine that slept has another monotonic clock than others
_NO_TIME_S: Final = 1e11  # of wall clocks, the year 5138


class PeerClocks:
    """Clocks of coordinator and peers, compared with ours.

    Example:
        clocks = PeerClocks(clock, parties)
        clocks.note(peer, now_s=1.7e9, at_s=clock.monotonic_s())
        clocks.finding()  # "" unless our clock is wrong
    """

    def __init__(self, clock: Clock, parties: Parties) -> None:
        self._clock = clock
        self._parties = parties
        self._peers = BoundedTable[NodeId, _Noted](_MAX_PEERS, is_kept=self._is_established)
        self._coordinator: _Noted | None = None
        self._is_known_wrong = False  # since `new_finding` said so

    def note(self, node_id: NodeId, now_s: float, at_s: float) -> None:
        """Records the wall clock of a peer that proved its key where we dialled it; `at_s`: our monotonic time."""
        if _is_time(now_s):
            self._peers[node_id] = _Noted(now_s - at_s, at_s)

    def note_coordinator(self, now_s: float, at_s: float) -> None:
        """Records the wall clock of the coordinator, whose key the link names; `at_s`: our monotonic time."""
        if _is_time(now_s):
            self._coordinator = _Noted(now_s - at_s, at_s)

    def finding(self) -> str:
        """Sentence for the operator on a wrong clock of ours: by how much, the effect and the fix; "" for none."""
        coordinator = [] if self._coordinator is None else self._ahead(self._coordinator)
        votes = [*self._votes(), *coordinator]
        for sign in (1, -1):
            num_off = sum(sign * ahead_s > CLOCK_SKEW_S for ahead_s in votes)
            if 2 * num_off > len(votes) and all(sign * ahead_s > CLOCK_SKEW_S for ahead_s in coordinator):
                return (
                    f"this node's clock is {abs(median(votes)):.0f} s {'ahead' if sign > 0 else 'behind'}, by "
                    f"{num_off} of the {len(votes)} clocks of coordinator and peers that it knows; beyond "
                    f"{CLOCK_SKEW_S:.0f} s adverts and groups are refused; set the clock (run NTP)"
                )
        return ""

    def new_finding(self) -> str:
        """`finding` once each time that the clock becomes wrong, for a log; "" in between."""
        finding = self.finding()
        is_new, self._is_known_wrong = bool(finding) and not self._is_known_wrong, bool(finding)
        return finding if is_new else ""

    def _votes(self) -> list[float]:
        """Seconds that our clock is ahead, the median of each party; of strangers only if no established peer votes."""
        by_party = defaultdict[tuple[bool, str], list[float]](list)
        for node_id, noted in self._peers.items():
            party = self._parties.origin_of(node_id) or node_id
            by_party[self._is_established(node_id), party] += self._ahead(noted)
        votes = {key: median(found) for key, found in by_party.items() if found}
        established = [vote for (is_established, _), vote in votes.items() if is_established]
        return established or list(votes.values())

    def _ahead(self, noted: "_Noted") -> list[float]:
        """Seconds, in a list, that our wall clock is ahead of a noted one now; [] if the note is too old."""
        at_s = self._clock.monotonic_s()
        return [self._clock.now_s() - noted.base_s - at_s] if at_s - noted.at_s <= _FORGET_S else []

    def _is_established(self, node_id: NodeId) -> bool:
        return not self._parties.is_private and self._parties.is_established(node_id)


class _Noted(NamedTuple):
    base_s: float  # the other wall clock when our monotonic one was 0
    at_s: float  # monotonic, of that moment


def _is_time(now_s: float) -> bool:
    """False for the 0 of a release that states no clock, and for values that are no wall clock."""
    return 0 < now_s < _NO_TIME_S
