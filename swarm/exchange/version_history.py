"""Which policy versions existed: what the tokens of a group may say they were made by.

Invariant: the table of our own lineage holds only what this node published, as one branch: after a rewind to a
checkpoint the versions beyond it are no more, since a step of the old branch says nothing about its distance from the
new head. Every table is bounded, and what is forgotten is older than anyone may use.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable
from swarm.types import Digest, NodeId, PolicyVersion, RefusalReason, RolloutGroup, short

MAX_VERSIONS: Final = 4096  # remembered of one lineage
MAX_LINEAGES: Final = 64  # other than our own


class Existence(StrEnum):
    """What is known of a version that somebody names."""

    CURRENT = "current"  # of the branch that goes on
    ABANDONED = "abandoned"  # it existed, on a branch that does not go on
    FORGOTTEN = "forgotten"  # older than what is remembered, or from before a restart
    UNKNOWN_NEWER = "unheard"  # newer than the newest one known
    CONFLICT = "false"  # that step has other weights


class Branch:
    """The versions of one lineage: step -> digest of the weights.

    Example:
        branch = Branch()
        branch.publish(version)
        branch.judge(version)  # Existence.CURRENT
    """

    def __init__(self) -> None:
        self._steps: dict[int, Digest] = {}
        self._newest_step = -1
        self.is_published = False  # by this process: what is newer than that does not exist
        self._abandoned = BoundedTable[tuple[int, Digest], None](MAX_VERSIONS)

    def note(self, version: PolicyVersion) -> None:
        """A version that certainly existed, in any order; another one of its step is then of an abandoned branch."""
        if self._steps.get(version.step, version.digest) != version.digest:
            self._abandon_from(version.step)
        self._set(version)

    def recall(self, version: PolicyVersion) -> None:
        """A version that existed, perhaps on a branch that was abandoned: what is known of its step already holds."""
        if version.step not in self._steps:
            self._set(version)
        elif self._steps[version.step] != version.digest:
            self._abandoned[version.step, version.digest] = None

    def publish(self, version: PolicyVersion) -> None:
        """The owner's newest version; what was beyond it, or in its place, is abandoned."""
        self.is_published = True
        self._abandon_from(version.step + 1)
        self.note(version)

    def judge(self, version: PolicyVersion) -> Existence:
        """Whether it existed."""
        digest = self._steps.get(version.step)
        if digest == version.digest:
            return Existence.CURRENT
        if (version.step, version.digest) in self._abandoned:
            return Existence.ABANDONED
        if version.step > self._newest_step:
            return Existence.UNKNOWN_NEWER
        return Existence.FORGOTTEN if digest is None else Existence.CONFLICT

    def _set(self, version: PolicyVersion) -> None:
        self._steps.pop(version.step, None)
        self._steps[version.step] = version.digest
        self._abandoned.pop((version.step, version.digest), None)
        self._newest_step = max(self._newest_step, version.step)
        while len(self._steps) > MAX_VERSIONS:
            del self._steps[min(self._steps)]

    def _abandon_from(self, step: int) -> None:
        if step > self._newest_step:
            return  # the usual case
        for each in sorted(known for known in self._steps if known >= step):
            self._abandoned[each, self._steps.pop(each)] = None
        self._newest_step = max(self._steps, default=-1)


class Versions:
    """The versions of our own lineage, and of those whose manifests this node has checked.

    A branch that was abandoned is only known to who saw it end: after a start, versions that seem false may be of one,
    and nobody is blamed for them as long as such groups can be on their way.

    Example:
        versions = Versions(identity.node_id, SystemClock())
        versions.publish(version)  # ours, at each step
        versions.note(manifest.version)  # anybody's, once its manifest was checked
        finding = versions.check(group)
    """

    def __init__(self, policy_id: NodeId, clock: Clock) -> None:
        self._own = policy_id
        self._clock = clock
        self._doubtful_until_s: float | None = None  # monotonic; None where nothing was restored
        self._branches: dict[str, Branch] = {policy_id: Branch()}

    def publish(self, version: PolicyVersion) -> None:
        """Our own lineage goes on from this version."""
        assert version.policy_id == self._own, version
        self._branches[self._own].publish(version)

    def note(self, version: PolicyVersion) -> None:
        """A version of any lineage certainly existed: its owner signed a manifest of it, or we published it."""
        branch = self._branches.get(version.policy_id)
        if branch is None:
            branch = self._branches[version.policy_id] = Branch()
            if len(self._branches) > MAX_LINEAGES + 1:
                del self._branches[next(name for name in self._branches if name != self._own)]
        branch.note(version)

    def restore(self, groups: Sequence[RolloutGroup], doubtful_s: float) -> None:
        """After a restart: stored groups of our own lineage name versions that were checked when they came.

        Args:
            groups: oldest first; of two versions of a step the one that came last is taken for the branch that goes on,
                unless a manifest said otherwise.
            doubtful_s: so long from now versions that seem false are refused without blame.
        """
        self._doubtful_until_s = self._clock.monotonic_s() + doubtful_s
        for group in reversed(groups):
            if group.policy_id == self._own:
                for version in reversed(group.versions):
                    self._branches[self._own].recall(version)

    def check(self, group: RolloutGroup) -> tuple[RefusalReason, str] | None:
        """What is wrong with the versions that a group of somebody else names; None where nothing is.

        Of a lineage of which nothing is known the digests are claims, and nothing is wrong with them. Reasons that an
        honest producer can run into (we restarted, rewound, or heard of a version later than it did) are innocent ones.
        """
        branch = self._branches.get(group.policy_id)
        if branch is None:
            return None
        findings = (_finding(branch, version, group.policy_id == self._own) for version in group.versions)
        finding = next((finding for finding in findings if finding is not None), None)
        if finding is not None and finding[0] is RefusalReason.BAD_VERSION and self._is_doubtful:
            return RefusalReason.TOO_OLD, f"{finding[1]}, or is of a branch that was abandoned before a restart"
        return finding

    @property
    def _is_doubtful(self) -> bool:
        return self._doubtful_until_s is not None and self._clock.monotonic_s() < self._doubtful_until_s


def _finding(branch: Branch, version: PolicyVersion, is_own: bool) -> tuple[RefusalReason, str] | None:
    name = f"version {version.step} of {short(version.policy_id)}, weights {short(version.digest) or 'unnamed'},"
    match branch.judge(version):
        case Existence.CURRENT:
            return None
        case Existence.ABANDONED:  # of a lineage that is only followed the branch is its owner's affair
            return (RefusalReason.TOO_OLD, f"{name} is of a branch that was abandoned") if is_own else None
        case Existence.FORGOTTEN:
            return RefusalReason.TOO_OLD, f"{name} is not remembered any more"
        case Existence.UNKNOWN_NEWER:
            reason = RefusalReason.BAD_VERSION if branch.is_published else RefusalReason.FROM_THE_FUTURE
            return reason, f"{name} is newer than all that is known"
        case Existence.CONFLICT:
            return RefusalReason.BAD_VERSION, f"{name} never existed"
