"""Tables of the groups that wait for a draw: by origin, by source, and which of them is the next to be evicted.

Invariant: a group is in `all` and in every table that its origin puts it in, or in none; `num_bytes` is their sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.exchange.external_sampler import Candidate
from swarm.fairness import FairTable
from swarm.peers.parties import SHARE
from swarm.types import Digest, NodeId, ScoredGroup


@dataclass(eq=False, kw_only=True, slots=True)
class ReplayEntry(Candidate):
    """A group with what is asked of it again and again: a draw looks at thousands of entries."""

    scored: ScoredGroup
    is_own_policy: bool
    party: str  # of its producer, when the group came
    is_newcomer: bool  # counts among the groups of all newcomers, whatever becomes of its producer
    uses: int
    has_signal: bool
    policy_id: str
    oldest_step: int
    newest_step: int


BySource = FairTable[str, ReplayEntry]


class ReplayTables:
    """Every group held.

    Example:
        tables = ReplayTables()
        tables.hold(entry)
        tables.remove(tables.oldest_to_evict())
    """

    def __init__(self) -> None:
        self.all: dict[Digest, ReplayEntry] = {}
        self.local: dict[Digest, ReplayEntry] = {}  # of the own lineage, in order of arrival
        self.followers = BySource()  # those of them that other nodes made, established ones: by node
        self.external = BySource()  # of other lineages, of established nodes: by party
        self.new_followers = BySource()  # both of newcomers
        self.new_external = BySource()
        self.num_bytes = 0  # sealed
        self._num_bytes_of_newcomers = 0

    def hold(self, entry: ReplayEntry) -> None:
        """Takes an entry in that is not held."""
        digest = entry.scored.digest
        if entry.is_own_policy:
            self.local[digest] = entry
        table = self.by_source(entry)
        if table is not None:
            table.add(_source_of(entry), entry)
        self.all[digest] = entry
        self._count(entry, 1)

    def remove(self, entry: ReplayEntry) -> None:
        """Lets go of an entry that is held."""
        digest = entry.scored.digest
        self.local.pop(digest, None)
        table = self.by_source(entry)
        if table is not None:
            table.remove(_source_of(entry), entry)
        del self.all[digest]
        self._count(entry, -1)

    def by_source(self, entry: ReplayEntry) -> BySource | None:
        """The table that counts a group by who made it; None for what this node made of its own lineage."""
        if not entry.is_own_policy:
            return self.new_external if entry.is_newcomer else self.external
        if entry.scored.is_made_here:
            return None
        return self.new_followers if entry.is_newcomer else self.followers

    def num_of_follower(self, node_id: NodeId) -> int:
        """Groups of the own lineage that this node made elsewhere."""
        return len(self.followers.of(node_id)) + len(self.new_followers.of(node_id))

    @property
    def producers(self) -> set[str]:
        """Established followers, and parties of other lineages, with a group here."""
        return set(self.followers.parties | self.external.parties)

    def of_same_task(self, entry: ReplayEntry) -> Iterable[ReplayEntry]:
        """What its source has here of this task."""
        table = self.by_source(entry)
        held = () if table is None else table.of(_source_of(entry))
        return (other for other in held if other.task == entry.task)

    def oldest_to_evict(self) -> ReplayEntry:
        """The oldest group of the source that holds most: external groups first, then those of followers, and what was
        made here last, so that no peer can displace it. Newcomers come before all while they hold more than their
        share of groups or bytes."""
        new = self.new_external or self.new_followers
        is_above_share = len(new) * SHARE > len(self.all) or self._num_bytes_of_newcomers * SHARE > self.num_bytes
        held = new if new and is_above_share else self.external or self.followers or new
        return held.oldest_of_longest() if held else next(iter(self.local.values()))

    def _count(self, entry: ReplayEntry, by: int) -> None:
        self.num_bytes += by * entry.scored.size_bytes
        if entry.is_newcomer:
            self._num_bytes_of_newcomers += by * entry.scored.size_bytes


def _source_of(entry: ReplayEntry) -> str:
    """Who is counted as its source: the party, or of the own lineage the follower, who had credit for it."""
    return entry.source if entry.is_own_policy else entry.party
