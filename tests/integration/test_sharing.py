"""Sharing teaches what is not in a node's curriculum: the tiny preset against the same run without sharing."""

from pathlib import Path
from statistics import fmean

import pytest

from swarm.report.figures import mean_change
from swarm.simulate.command import judge, silo_of, swarm_result
from swarm.simulate.local.run import SwarmRun, run_swarm
from swarm.simulate.presets import SimulationOptions

OPTIONS = SimulationOptions(preset="tiny", nodes=4, rounds=30, seed=0)


def _held_out_accuracy(run: SwarmRun) -> float:
    """Mean over nodes and over own and other tasks of the last held-out accuracy."""
    result = swarm_result(run)
    own, other = mean_change(result, "held_out", own=True), mean_change(result, "held_out", own=False)
    assert own is not None and other is not None
    return fmean([own.after, other.after, other.after, other.after])  # 2 of 8 tasks are own


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("shared_forks")
@pytest.mark.sweep
async def test_sharing_beats_silo_on_the_full_mix_at_equal_rounds(tmp_path: Path) -> None:
    shared = await run_swarm(OPTIONS, tmp_path / "swarm", lambda name, event: None, lambda activities: None)
    alone = await run_swarm(silo_of(OPTIONS), tmp_path / "silo", lambda name, event: None, lambda activities: None)
    broken = [verdict for verdict in judge([shared, alone]).verdicts() if not verdict.holds]
    assert not broken
    assert _held_out_accuracy(shared) - _held_out_accuracy(alone) >= 0.08
