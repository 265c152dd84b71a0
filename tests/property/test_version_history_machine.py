"""VersionHistory under any sequence of calls, against a model that is a plain dict and a set."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.types import PolicyVersion
from swarm.version_history import VersionHistory, VersionStatus

versions = st.builds(
    lambda step, byte: PolicyVersion(policy_id="a" * 64, step=step, digest=bytes([byte]) * 32),
    st.integers(0, 6),
    st.integers(1, 3),
)
EVERY = [PolicyVersion(policy_id="a" * 64, step=s, digest=bytes([b]) * 32) for s in range(7) for b in range(1, 4)]


class HistoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.history = VersionHistory(max_versions=4, max_abandoned=100)
        self.current: dict[int, PolicyVersion] = {}
        self.abandoned: set[PolicyVersion] = set()

    def drop_beyond(self, step: int) -> list[PolicyVersion]:
        gone = [self.current.pop(each) for each in sorted(self.current) if each > step]
        self.abandoned.update(gone)
        return gone

    @rule(version=versions, replaces=st.booleans())
    def record(self, version: PolicyVersion, replaces: bool) -> None:
        is_conflict = self.current.get(version.step, version) != version
        assert self.history.record(version, replaces=replaces) is (replaces or not is_conflict)
        if is_conflict and not replaces:
            return
        if is_conflict:
            self.drop_beyond(version.step - 1)
        self.current[version.step] = version
        self.abandoned.discard(version)
        if len(self.current) > 4:
            del self.current[min(self.current)]

    @rule(step=st.integers(-1, 6))
    def rewind(self, step: int) -> None:
        assert self.history.rewind(step) == self.drop_beyond(step)

    @rule(step=st.integers(0, 6))
    def forget(self, step: int) -> None:
        self.history.forget(step)
        self.current.pop(step, None)

    @rule(version=versions)
    def record_abandoned(self, version: PolicyVersion) -> None:
        if self.current.get(version.step) != version:
            self.history.record_abandoned(version)
            self.abandoned.add(version)

    @invariant()
    def agrees(self) -> None:
        steps = sorted(self.current)
        assert self.history.after(-1) == [self.current[step] for step in steps]
        assert self.history.head == (self.current[steps[-1]] if steps else None)
        for version in EVERY:
            if self.current.get(version.step) == version:
                expected = VersionStatus.CURRENT
            elif version in self.abandoned:
                expected = VersionStatus.ABANDONED
            elif version.step > max(steps, default=-1):
                expected = VersionStatus.UNKNOWN_NEWER
            else:
                expected = VersionStatus.CONFLICT if version.step in self.current else VersionStatus.FORGOTTEN
            assert self.history.status(version) is expected


TestVersionHistory = HistoryMachine.TestCase
