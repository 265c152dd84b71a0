"""Known versions of our own and of followed lineages, against which the versions of a group are checked.

Invariant: the history of our own lineage holds only versions that this node published, as one branch: after a rewind to
a checkpoint the later versions are abandoned, since a step of the old branch says nothing about its distance from the
new head. Every table is bounded, and forgotten versions are too old for any node.
"""

from collections.abc import Sequence
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable
from swarm.types import NodeId, PolicyVersion, RefusalReason, RolloutGroup, short
from swarm.version_history import VersionHistory, VersionStatus

MAX_LINEAGES: Final = 64  # other than our own


class KnownVersions:
    """Versions of our own lineage, and of lineages whose manifests this node has checked.

    For `doubtful_s` after a restore, a version that seems false may belong to a branch that was abandoned before the
    restart. This node does not know the abandoned branches, so it blames no producer.
    """

    def __init__(self, policy_id: NodeId, clock: Clock) -> None:
        self._policy_id = policy_id
        self._clock = clock
        self._doubtful_until_s: float | None = None  # monotonic; None without a restore
        self._own = VersionHistory()
        self._is_published = False  # by this process: no version newer than our head exists
        self._others = BoundedTable[str, VersionHistory](MAX_LINEAGES)  # the lineage found last comes last

    def publish(self, version: PolicyVersion) -> None:
        """Continues our own lineage from this version; later versions, and another one of its step, are abandoned."""
        assert version.policy_id == self._policy_id, version
        self._is_published = True
        self._own.rewind(version.step)
        self._own.record(version)

    def record(self, version: PolicyVersion) -> None:
        """Records a version that certainly existed: its owner signed a manifest of it, or we published it."""
        history = self._history(version.policy_id)
        if history is None:
            history = self._others[version.policy_id] = VersionHistory()
        history.record(version)

    def restore(self, groups: Sequence[RolloutGroup], doubtful_s: float) -> None:
        """Restores our own versions after a restart from stored groups, which were checked when they came.

        Args:
            groups: oldest first; of two versions of a step the newest is taken as current, unless a manifest names the
                other.
            doubtful_s: seconds in which versions that seem false are refused without blame.
        """
        self._doubtful_until_s = self._clock.monotonic_s() + doubtful_s
        for group in reversed(groups):
            if group.policy_id == self._policy_id:
                for version in reversed(group.versions):
                    if not self._own.record(version, replaces=False):
                        self._own.record_abandoned(version)

    def check(self, group: RolloutGroup) -> tuple[RefusalReason, str] | None:
        """Returns the first fault in the versions that a group of another node names.

        None without a fault, or if nothing is known of the lineage. Reasons that an honest producer can run into (we
        restarted, rewound, or learned of a version later than the producer) blame nobody.
        """
        history = self._history(group.policy_id)
        if history is None:
            return None
        finding = next(filter(None, (self._finding(history, version) for version in group.versions)), None)
        until_s = self._doubtful_until_s
        is_doubtful = until_s is not None and self._clock.monotonic_s() < until_s
        if finding is not None and finding[0] is RefusalReason.BAD_VERSION and is_doubtful:
            return RefusalReason.TOO_OLD, f"{finding[1]}, or is of a branch that was abandoned before a restart"
        return finding

    def _history(self, policy_id: str) -> VersionHistory | None:
        return self._own if policy_id == self._policy_id else self._others.get(policy_id)

    def _finding(self, history: VersionHistory, version: PolicyVersion) -> tuple[RefusalReason, str] | None:
        is_own = history is self._own
        name = f"version {version.step} of {short(version.policy_id)}, weights {short(version.digest) or 'unnamed'},"
        match history.status(version):
            case VersionStatus.CURRENT:
                return None
            case VersionStatus.ABANDONED:  # a followed lineage may rewind as its owner likes
                return (RefusalReason.TOO_OLD, f"{name} is of a branch that was abandoned") if is_own else None
            case VersionStatus.FORGOTTEN:
                return RefusalReason.TOO_OLD, f"{name} is not remembered any more"
            case VersionStatus.UNKNOWN_NEWER:
                is_false = is_own and self._is_published
                reason = RefusalReason.BAD_VERSION if is_false else RefusalReason.FROM_THE_FUTURE
                return reason, f"{name} is newer than all that is known"
            case VersionStatus.CONFLICT:
                return RefusalReason.BAD_VERSION, f"{name} never existed"
