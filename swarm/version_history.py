"""Version history of one training lineage: the branch in force, rewinds, and the branches that were abandoned.

The coordinator's ledger, admission and the follower each hold such histories; they differ in whom they believe, which
is `replaces` of `record`. Invariant: in the branch in force a step has one version, and both tables are bounded.
"""

from bisect import bisect_left, bisect_right, insort
from enum import StrEnum
from typing import Final

from swarm.flow import BoundedTable
from swarm.types import PolicyVersion

MAX_VERSIONS: Final = 4096  # remembered of one lineage, and as many of its abandoned branches
MAX_RECORDED: Final = 100  # versions handed to the ledger in one call


class VersionStatus(StrEnum):
    """Standing of a version in a history."""

    CURRENT = "current"  # of the branch in force
    ABANDONED = "abandoned"  # existed, on a branch that was abandoned
    FORGOTTEN = "forgotten"  # nothing is known of its step, which is not newer than the head
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
        """Newest version of the branch in force."""
        return self._current[self._steps[-1]] if self._steps else None

    def copy(self) -> "VersionHistory":
        """Another history that knows the same."""
        other = VersionHistory(self._max_versions, self._max_abandoned)
        other._current, other._steps = dict(self._current), list(self._steps)
        for version in self._abandoned:
            other._abandoned[version] = None
        return other

    def record(self, version: PolicyVersion, *, replaces: bool = True) -> bool:
        """Takes a version into the branch in force, in any order of steps; the oldest one makes room.

        Args:
            replaces: whether it is believed over another version at its step, which is then abandoned with all later
                ones.

        Returns:
            False, and nothing changes, for a conflict that it does not replace.
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
        """Abandons the versions beyond `step`. Returns them, oldest first."""
        first = bisect_right(self._steps, step)
        gone = [self._current.pop(each) for each in self._steps[first:]]
        del self._steps[first:]
        for version in gone:
            self._abandoned[version] = None
        return gone

    def record_abandoned(self, version: PolicyVersion) -> None:
        """Remembers a version that existed on a branch that is not in force."""
        self._abandoned[version] = None

    def forget(self, step: int) -> None:
        """Drops a step from the branch in force without a trace."""
        if self._current.pop(step, None) is not None:
            del self._steps[bisect_left(self._steps, step)]

    def status(self, version: PolicyVersion) -> VersionStatus:
        """Standing of a version."""
        known = self._current.get(version.step)
        if known == version:
            return VersionStatus.CURRENT
        if version in self._abandoned:
            return VersionStatus.ABANDONED
        if not self._steps or version.step > self._steps[-1]:
            return VersionStatus.UNKNOWN_NEWER
        return VersionStatus.FORGOTTEN if known is None else VersionStatus.CONFLICT

    def at(self, step: int) -> PolicyVersion | None:
        """The version of the branch in force at a step."""
        return self._current.get(step)

    def after(self, step: int, limit: int | None = None) -> list[PolicyVersion]:
        """Up to `limit` versions of the branch in force beyond `step`, oldest first."""
        first = bisect_right(self._steps, step)
        last = None if limit is None else first + limit
        return [self._current[each] for each in self._steps[first:last]]

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VersionHistory) and self._current == other._current
