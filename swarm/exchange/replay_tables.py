"""Tables of the groups that wait for a draw, by origin and by source, and an estimate of the memory of a group.

The size on the wire says little about memory: 400 bytes may be a megabyte of texts.

Invariant: a group is in `all` and in every table of its origin, or in none; `num_bytes` and `num_stored_bytes` are sums
over `all`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from sys import getsizeof
from typing import Final

from swarm.episode import EpisodeOutcome
from swarm.exchange.external_sampler import Candidate
from swarm.fairness import FairTable
from swarm.trust_policy import SHARE
from swarm.types import Digest, NodeId, Rollout, ScoredGroup

# Objects and references, fitted to what `tracemalloc` counts: `tests/unit/test_held_bytes.py` bounds the error.
_OF_GROUP: Final = 2000  # its names and digests, too
_OF_ROLLOUT: Final = 250
_OF_CLAIM: Final = 90
_OF_ARRAY: Final = 140
_OF_SPAN: Final = 100
_OF_TRANSITION: Final = 250
_OF_MESSAGE: Final = 110


@dataclass(eq=False, kw_only=True, slots=True)
class ReplayEntry(Candidate):
    """A group with the facts that each draw needs: a draw looks at thousands of entries."""

    scored: ScoredGroup
    is_own_policy: bool
    party: str  # of its producer, when the group came
    is_newcomer: bool  # counts as a newcomer's, even if its producer is established later
    num_bytes: int  # of memory, `held_bytes`
    uses: int
    is_wanted: bool  # a draw would hand it out
    policy_id: str
    oldest_step: int
    newest_step: int


BySource = FairTable[str, ReplayEntry]


class ReplayTables:
    """Tables of every group that a replay buffer holds."""

    def __init__(self) -> None:
        self.all: dict[Digest, ReplayEntry] = {}
        self.local: dict[Digest, ReplayEntry] = {}  # of the own lineage, in order of arrival
        self.followers = BySource()  # local groups that established other nodes made, by node
        self.external = BySource()  # of other lineages, by established nodes: by party
        self.new_followers = BySource()  # the same two tables for newcomers
        self.new_external = BySource()
        self.num_bytes = 0  # of memory
        self.num_stored_bytes = 0  # sealed, as they lie in the store
        self._num_bytes_of_newcomers = 0

    def hold(self, entry: ReplayEntry) -> None:
        """Adds an entry that is not held."""
        digest = entry.scored.digest
        if entry.is_own_policy:
            self.local[digest] = entry
        table = self.by_source(entry)
        if table is not None:
            table.add(_source_of(entry), entry)
        self.all[digest] = entry
        self._count(entry, 1)

    def remove(self, entry: ReplayEntry) -> None:
        """Removes an entry that is held."""
        digest = entry.scored.digest
        self.local.pop(digest, None)
        table = self.by_source(entry)
        if table is not None:
            table.remove(_source_of(entry), entry)
        del self.all[digest]
        self._count(entry, -1)

    def by_source(self, entry: ReplayEntry) -> BySource | None:
        """The table that counts a group by its source; None for this node's own groups of its own lineage."""
        if not entry.is_own_policy:
            return self.new_external if entry.is_newcomer else self.external
        if entry.scored.is_made_here:
            return None
        return self.new_followers if entry.is_newcomer else self.followers

    def num_of_follower(self, node_id: NodeId) -> int:
        """Number of held groups of the own lineage that another node, the follower `node_id`, made."""
        return len(self.followers.of(node_id)) + len(self.new_followers.of(node_id))

    @property
    def producers(self) -> set[str]:
        """Followers, and parties of other lineages, with a group here; established ones only."""
        return set(self.followers.parties | self.external.parties)

    def of_same_task(self, entry: ReplayEntry) -> Iterable[ReplayEntry]:
        """Held groups of the same source and task; none for a group of the own lineage that was made here."""
        table = self.by_source(entry)
        held = () if table is None else table.of(_source_of(entry))
        return (other for other in held if other.task == entry.task)

    def oldest_to_evict(self) -> ReplayEntry:
        """The oldest group of the source that holds most, in the first class that holds any.

        The classes in order: newcomers' groups while they have more than their share of groups or bytes, external
        groups, followers' groups, other newcomers' groups, and last groups made here, which no peer can displace.
        """
        new = self.new_external or self.new_followers
        is_above_share = len(new) * SHARE > len(self.all) or self._num_bytes_of_newcomers * SHARE > self.num_bytes
        held = new if new and is_above_share else self.external or self.followers or new
        return held.oldest_of_longest() if held else next(iter(self.local.values()))

    def _count(self, entry: ReplayEntry, by: int) -> None:
        self.num_bytes += by * entry.num_bytes
        self.num_stored_bytes += by * entry.scored.size_bytes
        if entry.is_newcomer:
            self._num_bytes_of_newcomers += by * entry.num_bytes


def _source_of(entry: ReplayEntry) -> str:
    """The source that a group counts for: its producer's party, or in the own lineage the follower that made it."""
    return entry.source if entry.is_own_policy else entry.party


def held_bytes(scored: ScoredGroup) -> int:
    """Estimated bytes of memory of a group with its outcomes."""
    rollouts = sum(map(_of_rollout, scored.group.rollouts))
    outcomes = {id(outcome): outcome for outcome in scored.outcomes}  # equal ones are mostly one
    return _OF_GROUP + scored.group.prompt_ids.nbytes + rollouts + sum(map(_of_outcome, outcomes.values()))


def newest_within(max_bytes: float, groups: Iterable[ScoredGroup]) -> list[ScoredGroup]:
    """The newest groups that fit into `max_bytes` of memory, oldest first; `groups` come newest first."""
    found, num_bytes = list[ScoredGroup](), 0
    for scored in groups:
        num_bytes += held_bytes(scored)
        if num_bytes > max_bytes:
            break
        found.append(scored)
    return found[::-1]


def _of_rollout(rollout: Rollout) -> int:
    size_bytes = _OF_ROLLOUT + sum(map(getsizeof, rollout.actions)) + _OF_CLAIM * len(rollout.claimed_turns)
    trace = rollout.trace
    if trace is not None:
        for array in (trace.token_ids, trace.action_mask, trace.turn_ids, trace.logprobs, trace.byte_lengths):
            size_bytes += 0 if array is None else _OF_ARRAY + array.nbytes
        size_bytes += _OF_SPAN * len(trace.spans)
    return size_bytes


def _of_outcome(outcome: EpisodeOutcome) -> int:
    size_bytes = 0
    for each in outcome.transitions:
        size_bytes += _OF_TRANSITION + getsizeof(each.state_key)
        size_bytes += sum([_OF_MESSAGE + getsizeof(message.content) for message in each.messages])
    return size_bytes
