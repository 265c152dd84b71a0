"""Ledger of policy versions: one append-only history per training lineage.

Invariant: whatever was accepted stays in the history (the store keeps its newest lines); within one branch
steps strictly increase and a step has one digest.

A lineage belongs to the node whose id is its policy id. A node that restarts from a checkpoint announces it by
recording, once more, the version that it resumed from (a step below the head, with the digest that the
ledger has). That is a *rewind*: it changes nothing by itself, but from there the steps may be made again.
Steps with the same digest as before are the same versions; the first that differs opens a new *branch*,
and what it replaces remains in the history under the old branch number. Another digest for a recorded
step without a rewind is a *fork* and is refused.
"""

from dataclasses import dataclass, field
from typing import Final

from swarm.types import NodeId, PolicyVersion, short
from swarm.version_history import MAX_VERSIONS, VersionHistory, VersionStatus

MAX_LINEAGES: Final = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One line of the history: an accepted version, or a rewind to one."""

    version: PolicyVersion
    branch: int  # 0 until the first rewind that led to other weights
    parent: int  # step of the version before it in its branch, -1 for the first; of a rewind: the former head
    at_s: float  # wall clock of the coordinator
    is_rewind: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAnswer:
    """The answer to one version: accepted or the reason why not, and the entry to store when it is new."""

    accepted: bool
    reason: str = ""
    entry: LedgerEntry | None = None  # None: refused, or already there


@dataclass(slots=True)
class LedgerLineage:
    """The present branch of one lineage."""

    versions: VersionHistory
    branch: int = 0
    resumed_at: int = -1  # step to which the owner went back, or the head
    num_rewinds: int = 0

    @property
    def head_step(self) -> int:
        """Newest step of the branch, -1 before the first."""
        head = self.versions.head
        return -1 if head is None else head.step


@dataclass(slots=True)
class Ledger:
    """The lineages of one run.

    A version is judged, stored by the caller, and only then applied, so that the ledger holds nothing that a crash
    could undo.

    Example:
        answer = ledger.judge(node_id, version, now_s=clock.now_s())
        if answer.entry is not None:
            await store.add_version(answer.entry)
        ledger.apply(version, answer)
    """

    max_lineages: int = MAX_LINEAGES
    max_versions: int = MAX_VERSIONS  # newest steps of a lineage to which a node may still rewind
    lineages: dict[str, LedgerLineage] = field(default_factory=dict[str, LedgerLineage])  # by policy id

    def judge(self, owner: NodeId, version: PolicyVersion, now_s: float) -> LedgerAnswer:
        """What becomes of a version; changes nothing.

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
        lineage = self.lineages.get(owner)
        if lineage is None:
            if len(self.lineages) >= self.max_lineages:
                return _refuse(f"the ledger holds {self.max_lineages} lineages; no room for another")
            return LedgerAnswer(accepted=True, entry=LedgerEntry(version=version, branch=0, parent=-1, at_s=now_s))
        parent = lineage.resumed_at
        if lineage.versions.status(version) is VersionStatus.CURRENT:
            if version.step >= parent:  # a retry, or a step made again with the same result
                return LedgerAnswer(accepted=True, reason="already recorded")
            entry = LedgerEntry(version=version, branch=lineage.branch, parent=parent, at_s=now_s, is_rewind=True)
            return LedgerAnswer(accepted=True, reason=f"rewind from step {parent} to {version.step}", entry=entry)
        if version.step > parent:
            branch = lineage.branch + (lineage.head_step > parent)
            entry = LedgerEntry(version=version, branch=branch, parent=parent, at_s=now_s)
            return LedgerAnswer(accepted=True, entry=entry)
        known = lineage.versions.at(version.step)
        if known is None:
            return _refuse(f"going back: step {version.step} was never recorded and the head is {lineage.head_step}")
        return _refuse(
            f"fork: step {version.step} is recorded with digest {short(known.digest)}, not {short(version.digest)}; "
            "after a restart record the version resumed from first"
        )

    def apply(self, version: PolicyVersion, answer: LedgerAnswer) -> None:
        """Takes a judged version, whose entry is durable; no other version of its lineage was applied meanwhile."""
        if answer.entry is not None:
            self._apply(answer.entry)
        elif answer.accepted:
            self.lineages[version.policy_id].resumed_at = version.step

    def restore(self, entries: list[LedgerEntry]) -> None:
        """Rebuilds the lineages from stored entries, in the order in which they were accepted."""
        for entry in entries:
            self._apply(entry)

    def head(self, policy_id: str) -> PolicyVersion | None:
        """Newest version of the present branch."""
        lineage = self.lineages.get(policy_id)
        return None if lineage is None else lineage.versions.head

    def versions(self, policy_id: str, after_step: int, limit: int) -> list[PolicyVersion]:
        """Up to `limit` remembered versions of the present branch with a step above `after_step`, oldest first."""
        lineage = self.lineages.get(policy_id)
        return [] if lineage is None else lineage.versions.after(after_step, limit)

    def _apply(self, entry: LedgerEntry) -> None:
        lineage = self.lineages.get(entry.version.policy_id)
        if lineage is None:
            # Abandoned branches are in the store, of as many lineages as there are: none are kept in memory.
            versions = VersionHistory(self.max_versions, max_abandoned=0)
            lineage = self.lineages[entry.version.policy_id] = LedgerLineage(versions)
        lineage.resumed_at = entry.version.step
        if entry.is_rewind:
            lineage.num_rewinds += 1
            return
        lineage.versions.rewind(entry.parent)
        lineage.versions.record(entry.version)
        lineage.branch = entry.branch


def _refuse(reason: str) -> LedgerAnswer:
    return LedgerAnswer(accepted=False, reason=reason)
