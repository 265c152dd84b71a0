"""Disks of a virtual swarm that lose and change what is on them: the invariants hold, and can fail."""

from collections.abc import Callable
from typing import Any

import pytest

from swarm.clock import Clock
from swarm.interfaces import BeforeWrite
from swarm.report.invariants import ONCE, ONE_PLACE, REPEAT, SENT_WHOLE
from swarm.simulate.virtual import group_store
from swarm.simulate.virtual.faults import Crash, DiskDamage, DiskFault, FaultPlan
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.node import Checkpoints, Parts
from swarm.simulate.virtual.run import VirtualRun, run_seed
from swarm.types import PolicyVersion

Break = Callable[[pytest.MonkeyPatch], Parts]


def run_with(fault: DiskFault | None, parts: Parts | None = None, seed: int = 5) -> VirtualRun:
    """Nodes 1 and 2 crash; the disk of the first has a fault, and the other comes back later and reads its log anew."""
    crashes = (Crash(node=1, at_s=29.0, down_s=1.0), Crash(node=2, at_s=29.0, down_s=1.5))
    damages = () if fault is None else (DiskDamage(node=1, fault=fault),)
    return run_seed(seed, 4, 12, FaultPlan(latency_s=0.05, crashes=crashes, damages=damages), parts)


@pytest.mark.parametrize("fault", DiskFault)
def test_whatever_one_disk_does_every_invariant_holds(fault: DiskFault) -> None:
    run = run_with(fault)
    assert run.invariants.hold, run.invariants.violations
    assert run.log_digest != run_with(None).log_digest, "the fault did something"


class UnsyncedStore(MemoryGroupStore):
    """Syncs no draw."""

    def _note_state(self, *, is_synced: bool) -> None:
        super()._note_state(is_synced=False)


class OneEpochStore(MemoryGroupStore):
    """Its log has the same epoch for ever."""

    def __init__(
        self, clock: Clock, max_bytes: int, before_write: BeforeWrite | None = None, epoch: str | None = None
    ) -> None:
        super().__init__(clock, max_bytes, before_write, "the only one")

    def _begin_epoch(self, epoch: str) -> None:
        pass


class TrustingCheckpoints(Checkpoints):
    """Believes what it reads."""

    def is_whole(self, version: PolicyVersion, digest: bytes) -> bool:
        return True


def _unchecked(patch: pytest.MonkeyPatch) -> Parts:
    patch.setattr(group_store, "is_whole", lambda sealed: True)  # pyright: ignore[reportUnknownLambdaType]
    return Parts()


def _with(**parts: Any) -> Break:
    return lambda patch: Parts(**parts)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "damage", "broken"),
    [
        (DiskFault.POWER_CUT, _with(store=UnsyncedStore), ONCE),
        (DiskFault.POWER_CUT, _with(store=OneEpochStore), ONE_PLACE),
        (DiskFault.LOST_STORE, _with(store=OneEpochStore), ONE_PLACE),
        (DiskFault.ROTTEN_GROUPS, _unchecked, SENT_WHOLE),
        (DiskFault.ROTTEN_CHECKPOINT, _with(checkpoints=TrustingCheckpoints), REPEAT),
    ],
    ids=["draws-synced", "epoch-after-power-cut", "epoch-of-new-store", "digest-read", "checkpoint-digest"],
)
def test_a_defence_taken_out_turns_its_invariant_red(
    fault: DiskFault, damage: Break, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(fault, damage(monkeypatch))
    assert run.invariants.violations.get(broken), run.invariants.verdicts()
