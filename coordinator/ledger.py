"""Which policy versions exist: one append-only history per training lineage.

Invariant: whatever was accepted stays in the history (the store keeps its newest lines); within one branch
steps strictly increase and a step has one digest.

A lineage belongs to the node whose id is its policy id. A node that restarts from a checkpoint says so by
recording, once more, the version that it resumed from (a step below the head, with the digest that the
ledger has). That is a *rewind*: it changes nothing by itself, but from there the steps may be made again.
Steps with the same digest as before are the same versions; the first that differs opens a new *branch*,
and what it replaces remains in the history under the old branch number. Another digest for a recorded
step without a rewind is a *fork* and is refused.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from swarm.types import Digest, NodeId, PolicyVersion, short

MAX_LINEAGES: Final = 20_000
MAX_REMEMBERED: Final = 4_096  # newest steps of a lineage to which a node may still rewind


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One line of the history: an accepted version, or a rewind to one."""

    version: PolicyVersion
    branch: int  # 0 until the first rewind that led to other weights
    parent: int  # step of the version before it in its branch, -1 for the first; of a rewind: the head left
    at_s: float  # wall clock of the coordinator
    is_rewind: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The answer to one version: accepted or the reason why not, and the entry to store when it is new."""

    accepted: bool
    reason: str = ""
    entry: LedgerEntry | None = None  # None: refused, or already there


@dataclass(slots=True)
class Lineage:
    """The present branch of one lineage."""

    branch: int = 0
    resumed_at: int = -1  # step to which the owner went back, or the head
    num_rewinds: int = 0
    digests: OrderedDict[int, Digest] = field(default_factory=OrderedDict[int, Digest])  # by increasing step

    @property
    def head(self) -> int:
        """Newest step of the branch, -1 before the first."""
        return next(reversed(self.digests), -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Undo:
    """A lineage before a record: small however long the lineage is."""

    branch: int
    resumed_at: int
    num_rewinds: int
    left: tuple[tuple[int, Digest], ...]  # steps beyond `resumed_at`, increasing: a new branch replaces them
    oldest: tuple[int, Digest] | None  # makes room when the lineage is full


class Ledger:
    """The lineages of one run.

    Example:
        ledger = Ledger()
        answer = ledger.record(node_id, version, now_s=clock.now_s())
    """

    def __init__(self, max_lineages: int = MAX_LINEAGES, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_lineages = max_lineages
        self._max_remembered = max_remembered
        self._lineages: dict[str, Lineage] = {}

    def record(self, owner: NodeId, version: PolicyVersion, now_s: float) -> Recorded:
        """Adds a version, or says why not.

        Args:
            owner: the node that proved its identity.
            version: what it says exists; the digest must be known.
            now_s: wall clock.
        """
        if version.policy_id != owner:
            return _refuse(f"lineage {short(version.policy_id)} does not belong to node {short(owner)}")
        if len(version.digest) != 32:
            return _refuse(f"step {version.step}: digest of {len(version.digest)} bytes, expected 32")
        if version.step < 0:
            return _refuse(f"step {version.step} is negative")
        lineage = self._lineages.get(owner)
        if lineage is None:
            if len(self._lineages) >= self._max_lineages:
                return _refuse(f"the ledger holds {self._max_lineages} lineages; no room for another")
            lineage = self._lineages[owner] = Lineage()
        known = lineage.digests.get(version.step)
        if known == version.digest:
            return self._repeat(lineage, version, now_s)
        if version.step <= lineage.resumed_at:
            return _refuse(self._why_not(lineage, version, known))
        return self._append(lineage, version, now_s)

    def _repeat(self, lineage: Lineage, version: PolicyVersion, now_s: float) -> Recorded:
        """A version that is there already: a retry, a rewind, or a step made again with the same result."""
        left, lineage.resumed_at = lineage.resumed_at, version.step
        if version.step >= left:
            return Recorded(accepted=True, reason="already recorded")
        lineage.num_rewinds += 1
        entry = LedgerEntry(version=version, branch=lineage.branch, parent=left, at_s=now_s, is_rewind=True)
        return Recorded(accepted=True, reason=f"rewind from step {left} to {version.step}", entry=entry)

    def _append(self, lineage: Lineage, version: PolicyVersion, now_s: float) -> Recorded:
        parent = lineage.resumed_at
        branch = lineage.branch + (lineage.head > parent)
        entry = LedgerEntry(version=version, branch=branch, parent=parent, at_s=now_s)
        self._take(lineage, entry)
        return Recorded(accepted=True, entry=entry)

    def _take(self, lineage: Lineage, entry: LedgerEntry) -> None:
        while lineage.head > entry.parent:
            lineage.digests.popitem()  # of the branch that was left; the history keeps it
        lineage.digests[entry.version.step] = entry.version.digest
        lineage.branch, lineage.resumed_at = entry.branch, entry.version.step
        if len(lineage.digests) > self._max_remembered:
            lineage.digests.popitem(last=False)

    def _why_not(self, lineage: Lineage, version: PolicyVersion, known: Digest | None) -> str:
        if known is not None:
            return (
                f"fork: step {version.step} is recorded with digest {short(known)}, not {short(version.digest)}; "
                "after a restart record the version resumed from first"
            )
        return f"going back: step {version.step} was never recorded and the head is {lineage.head}"

    def snapshot(self, policy_id: str) -> Undo | None:
        """What one `record` may change of a lineage, to put back when its new line could not be stored."""
        lineage = self._lineages.get(policy_id)
        if lineage is None:
            return None
        left = list(takewhile(lambda item: item[0] > lineage.resumed_at, reversed(lineage.digests.items())))
        return Undo(
            branch=lineage.branch,
            resumed_at=lineage.resumed_at,
            num_rewinds=lineage.num_rewinds,
            left=tuple(reversed(left)),
            oldest=next(iter(lineage.digests.items()), None),
        )

    def put_back(self, policy_id: str, undo: Undo | None) -> None:
        """Undoes the one record since `snapshot`, which could not be stored."""
        if undo is None:
            self._lineages.pop(policy_id, None)
            return
        lineage = self._lineages[policy_id]
        while lineage.head > undo.resumed_at:
            lineage.digests.popitem()
        lineage.digests.update(undo.left)
        if undo.oldest is not None and undo.oldest[0] not in lineage.digests:
            lineage.digests[undo.oldest[0]] = undo.oldest[1]
            lineage.digests.move_to_end(undo.oldest[0], last=False)
        lineage.branch, lineage.resumed_at, lineage.num_rewinds = undo.branch, undo.resumed_at, undo.num_rewinds

    def restore(self, entries: list[LedgerEntry]) -> None:
        """Rebuilds the lineages from stored entries, in the order in which they were accepted."""
        for entry in entries:
            lineage = self._lineages.setdefault(entry.version.policy_id, Lineage())
            if entry.is_rewind:
                lineage.num_rewinds += 1
                lineage.resumed_at = entry.version.step
            else:
                self._take(lineage, entry)

    def head(self, policy_id: str) -> PolicyVersion | None:
        """Newest version of the present branch."""
        lineage = self._lineages.get(policy_id)
        if lineage is None or not lineage.digests:
            return None
        return PolicyVersion(policy_id=policy_id, step=lineage.head, digest=lineage.digests[lineage.head])

    def versions(self, policy_id: str, after_step: int, limit: int) -> list[PolicyVersion]:
        """Up to `limit` remembered versions of the present branch with a step above `after_step`, oldest first."""
        lineage = self._lineages.get(policy_id, Lineage())
        steps = [step for step in lineage.digests if step > after_step][:limit]
        return [PolicyVersion(policy_id=policy_id, step=step, digest=lineage.digests[step]) for step in steps]

    def lineages(self) -> dict[str, Lineage]:
        """Every lineage by policy id; not to be changed."""
        return self._lineages


def _refuse(reason: str) -> Recorded:
    return Recorded(accepted=False, reason=reason)
