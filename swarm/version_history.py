"""Version history of one training lineage: the branch in force, rewinds, and the branches that were abandoned.

The coordinator's ledger, admission and the follower each hold such histories; they differ in the sources that may
replace a version (`replaces` of `record`). Invariant: in the branch in force a step has one version, and both tables
are bounded.
"""

from bisect import bisect_left, bisect_right, insort
from enum import StrEnum
from typing import Final

from swarm.flow import BoundedTable
from swarm.types import PolicyVersion

MAX_VERSIONS: Final = 4096  # kept of one lineage's branch in force, and as many of its abandoned branches
MAX_RECORDED: Final = 100  # versions sent to the ledger in one call


class VersionStatus(StrEnum):
    """Standing of a version in a history."""

    CURRENT = "current"  # of the branch in force
    ABANDONED = "abandoned"  # of a branch that was abandoned
    FORGOTTEN = "forgotten"  # no version is known at its step, which is not newer than the head
    UNKNOWN_NEWER = "unknown_newer"  # newer than the head
    CONFLICT = "conflict"  # the branch in force has another version at that step


class VersionHistory:
    """The versions of one lineage by step.

    Example:
        history = VersionHistory()
        history.record(version)
        history.status(version)  # VersionStatus.CURRENT
        history.rewind(3)  # the owner resumed from step 3: what was beyond it is abandoned
    """

    def __init__(self, max_versions: int = MAX_VERSIONS, max_abandoned: int = MAX_VERSIONS) -> None:
        assert max_versions > 0, max_versions
        self._max_versions, self._max_abandoned = max_versions, max_abandoned
        self._current: dict[int, PolicyVersion] = {}  # by step
        self._steps: list[int] = []  # of `_current`, increasing
        self._abandoned = BoundedTable[PolicyVersion, None](max_abandoned)

    @property
    def head(self) -> PolicyVersion | None:
        """Newest version of the branch in force; None if it is empty."""
        return self._current[self._steps[-1]] if self._steps else None

    def copy(self) -> "VersionHistory":
        """Returns an independent copy of this history."""
        other = VersionHistory(self._max_versions, self._max_abandoned)
        other._current, other._steps = dict(self._current), list(self._steps)
        for version in self._abandoned:
            other._abandoned[version] = None
        return other

    def record(self, version: PolicyVersion, *, replaces: bool = True) -> bool:
        """Adds a version to the branch in force, in any order of steps; beyond the limit, the lowest step is forgotten.

        Args:
            version: the version to add.
            replaces: True: if the branch has another version at this step, that version and all later ones are
                abandoned.

        Returns:
            False, with no change, if the branch has another version at this step and `replaces` is False.
        """
        known = self._current.get(version.step)
        if known is not None and known != version:
            if not replaces:
                return False
            self.rewind(version.step - 1)
        if version.step not in self._current:
            insort(self._steps, version.step)
        self._current[version.step] = version
        self._abandoned.pop(version, None)  # made again bit for bit
        if len(self._steps) > self._max_versions:
            self.forget(self._steps[0])
        return True

    def rewind(self, step: int) -> list[PolicyVersion]:
        """Abandons all versions later than `step` on the branch in force and returns them, oldest first."""
        first = bisect_right(self._steps, step)
        gone = [self._current.pop(each) for each in self._steps[first:]]
        del self._steps[first:]
        for version in gone:
            self._abandoned[version] = None
        return gone

    def record_abandoned(self, version: PolicyVersion) -> None:
        """Records a version of an abandoned branch."""
        self._abandoned[version] = None

    def forget(self, step: int) -> None:
        """Removes the version at a step from the branch in force, without marking it as abandoned."""
        if self._current.pop(step, None) is not None:
            del self._steps[bisect_left(self._steps, step)]

    def status(self, version: PolicyVersion) -> VersionStatus:
        """Standing of a version in this history."""
        known = self._current.get(version.step)
        if known == version:
            return VersionStatus.CURRENT
        if version in self._abandoned:
            return VersionStatus.ABANDONED
        if not self._steps or version.step > self._steps[-1]:
            return VersionStatus.UNKNOWN_NEWER
        return VersionStatus.FORGOTTEN if known is None else VersionStatus.CONFLICT

    def at(self, step: int) -> PolicyVersion | None:
        """The version of the branch in force at a step; None if there is none."""
        return self._current.get(step)

    def after(self, step: int, limit: int | None = None) -> list[PolicyVersion]:
        """Versions of the branch in force after `step`, oldest first: up to `limit`, or all."""
        first = bisect_right(self._steps, step)
        last = None if limit is None else first + limit
        return [self._current[each] for each in self._steps[first:last]]

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VersionHistory) and self._current == other._current
