"""Ledger of policy versions: one append-only history per training lineage.

Invariant: whatever was accepted stays in the history (the store keeps its newest lines); within one branch
steps strictly increase and a step has one digest.

A lineage belongs to the node whose id is its policy id. A node that restarts from a checkpoint announces this by
recording the version that it resumed from once more (a step below the head, with the digest that the ledger has).
This is a *rewind*: it changes no head, but the steps above may be recorded again. A step recorded again with the same
digest is the same version. The first step with another digest opens a new *branch*; the versions that it replaces
remain in the history under the old branch number. Another digest for a recorded step without a rewind is a *fork* and
is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from swarm.types import NodeId, PolicyVersion, short
from swarm.version_history import MAX_VERSIONS, VersionHistory, VersionStatus

MAX_LINEAGES: Final = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One line of the history: a new version, or a recorded version from which its owner goes on."""

    version: PolicyVersion
    branch: int  # 0 until the first rewind that led to other weights
    parent: int  # step from which the owner came: that of the version before in the branch, -1 for the first
    at_s: float  # wall clock of the coordinator
    is_rewind: bool = False  # the owner goes on from this version of the branch, which is older, or made again


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAnswer:
    """Answer to one version: accepted or refused, with a reason, and the entry to store if there is one."""

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
        """Newest step of the branch; -1 before the first version."""
        head = self.versions.head
        return -1 if head is None else head.step

    def judge(self, owner: NodeId, version: PolicyVersion, now_s: float) -> LedgerAnswer:
        """Judges one version without changing the lineage; a refusal is an answer, not an error."""
        if version.policy_id != owner:
            return _refuse(f"lineage {short(version.policy_id)} does not belong to node {short(owner)}")
        if len(version.digest) != 32:
            return _refuse(f"step {version.step}: digest of {len(version.digest)} bytes, expected 32")
        if version.step < 0:
            return _refuse(f"step {version.step} is negative")
        parent = self.resumed_at
        if self.versions.status(version) is VersionStatus.CURRENT:
            if version.step == parent:  # a retry
                return LedgerAnswer(accepted=True, reason="already recorded")
            is_made_again = version.step > parent  # with the same result, after a rewind
            reason = "already recorded" if is_made_again else f"rewind from step {parent} to {version.step}"
            entry = LedgerEntry(version=version, branch=self.branch, parent=parent, at_s=now_s, is_rewind=True)
            return LedgerAnswer(accepted=True, reason=reason, entry=entry)
        if version.step > parent:
            branch = self.branch + (self.head_step > parent)
            return LedgerAnswer(
                accepted=True, entry=LedgerEntry(version=version, branch=branch, parent=parent, at_s=now_s)
            )
        known = self.versions.at(version.step)
        if known is None:
            return _refuse(f"going back: step {version.step} was never recorded and the head is {self.head_step}")
        return _refuse(
            f"fork: step {version.step} is recorded with digest {short(known.digest)}, not {short(version.digest)}; "
            "after a restart record the version resumed from first"
        )

    def add(self, entry: LedgerEntry) -> None:
        """Applies an accepted entry."""
        num_undone = self.resumed_at - entry.version.step
        self.resumed_at = entry.version.step
        if entry.is_rewind:
            self.num_rewinds += num_undone > 0
            return
        self.versions.rewind(entry.parent)
        self.versions.record(entry.version)
        self.branch = entry.branch


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Answers to versions that were judged together, and the lineage with the accepted ones added."""

    answers: list[LedgerAnswer]  # one for each, in their order
    lineage: LedgerLineage
    evicted: str = ""  # policy id of the lineage that makes room

    @property
    def entries(self) -> list[LedgerEntry]:
        """Entries to store, in the order of the answers."""
        return [answer.entry for answer in self.answers if answer.entry is not None]


@dataclass(slots=True)
class Ledger:
    """The lineages of one run.

    Versions are judged, stored by the caller, and only then applied, so that the ledger holds nothing that a crash
    could undo.

    Example:
        judgement = ledger.judge(node_id, versions, now_s=clock.now_s())
        await store.add_versions(judgement.entries)
        ledger.apply(node_id, judgement)
    """

    max_lineages: int = MAX_LINEAGES
    max_versions: int = MAX_VERSIONS  # newest steps of a lineage to which a node may still rewind
    lineages: dict[str, LedgerLineage] = field(default_factory=dict[str, LedgerLineage])  # by policy id

    def judge(
        self,
        owner: NodeId,
        versions: Sequence[PolicyVersion],
        now_s: float,
        is_live: Callable[[NodeId], bool] = lambda owner: True,
    ) -> Judgement:
        """Judges versions of one node in order, each as if the accepted ones before it were recorded; changes nothing.

        Args:
            owner: node that proved its identity.
            versions: versions to record.
            now_s: wall clock of the coordinator.
            is_live: returns True if an owner is live; a new lineage in a full ledger replaces one of an owner that is
                not.

        Returns:
            An answer for each version. All are refused if the lineage is new and every lineage of a full ledger has a
            live owner.
        """
        known = self.lineages.get(owner)
        lineage = self._new_lineage() if known is None else replace(known, versions=known.versions.copy())
        is_full = known is None and len(self.lineages) >= self.max_lineages
        evicted = self._least_of_the_gone(is_live) if is_full else ""
        if is_full and not evicted:
            full = _refuse(f"the ledger holds {self.max_lineages} lineages; no room for another")
            return Judgement(answers=[full] * len(versions), lineage=lineage)
        answers: list[LedgerAnswer] = []
        for version in versions:  # each as if those before it were already in
            answers.append(lineage.judge(owner, version, now_s))
            if answers[-1].entry is not None:
                lineage.add(answers[-1].entry)
        return Judgement(answers=answers, lineage=lineage, evicted=evicted)

    def apply(self, owner: NodeId, judgement: Judgement) -> None:
        """Replaces the owner's lineage with the judged one, once its entries are durable.

        No other judgement of this owner may be applied between `judge` and this call. A lineage without a version is
        not kept.
        """
        if len(judgement.lineage.versions):  # what is refused must not begin a lineage
            self.lineages.pop(judgement.evicted, None)
            self.lineages[owner] = judgement.lineage

    def restore(self, entries: list[LedgerEntry]) -> None:
        """Rebuilds the lineages from stored entries, in the order in which they were accepted."""
        for entry in entries:
            policy_id = entry.version.policy_id
            if policy_id not in self.lineages:
                self.lineages[policy_id] = self._new_lineage()
            self.lineages[policy_id].add(entry)

    def head(self, policy_id: str) -> PolicyVersion | None:
        """Newest version of the present branch of a lineage; None if there is none."""
        lineage = self.lineages.get(policy_id)
        return None if lineage is None else lineage.versions.head

    def _least_of_the_gone(self, is_live: Callable[[NodeId], bool]) -> str:
        """Policy id of the lineage with the fewest versions whose owner is not live; empty if all owners are live."""
        gone = (owner for owner in self.lineages if not is_live(owner))
        return min(gone, key=lambda owner: len(self.lineages[owner].versions), default="")

    def _new_lineage(self) -> LedgerLineage:
        # Abandoned branches are in the store, of as many lineages as there are: none are kept in memory.
        return LedgerLineage(VersionHistory(self.max_versions, max_abandoned=0))


def _refuse(reason: str) -> LedgerAnswer:
    return LedgerAnswer(accepted=False, reason=reason)
