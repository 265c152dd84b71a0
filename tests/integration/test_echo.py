"""A trainer that only trains and generators that follow it: real processes, sockets, DHT and weights on the wire."""

import asyncio
from pathlib import Path

import pytest

from swarm.events import NodeStarted, events_of
from swarm.report.figures import follow_rows, mean_change
from swarm.simulate.command import judge, swarm_result
from swarm.simulate.local.run import SwarmRun, run_swarm
from swarm.simulate.presets import Mode, SimulationOptions

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("shared_forks"),
]

ROUNDS = 12


async def run(options: SimulationOptions, directory: Path) -> SwarmRun:
    return await run_swarm(options, directory, lambda name, event: None, lambda activities: None)


def holds(run: SwarmRun) -> bool:
    verdicts = judge([run]).verdicts()
    assert all(verdict.holds for verdict in verdicts), verdicts
    return True


async def test_generators_follow_and_the_trainer_learns_from_them(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as swarms:
        for mode in ("push", "pull", "synchronous"):
            swarms.create_task(_follows(mode, tmp_path / mode))


async def _follows(mode: Mode, directory: Path) -> None:
    done = await run(SimulationOptions(preset="echo-tiny", nodes=3, rounds=ROUNDS, mode=mode, minutes=2.0), directory)
    assert holds(done)
    trainer, *generators = swarm_result(done).nodes
    assert trainer.steps[-1].step == ROUNDS and trainer.num_generated == 0
    assert {node.node_id for node in generators} == set(trainer.sources)
    rows = follow_rows(swarm_result(done))
    assert [row.name for row in rows] == ["bell", "curie"]
    assert all(row.num_versions >= 3 and row.num_not_taken == 0 for row in rows)
    from_base = [taken.num_bytes for node in generators for taken in node.versions[:1] if taken.step == 0]
    assert from_base, "the first step is made of what somebody generated with version 0"
    assert max(from_base) < 20_000, "the base model itself does not travel"
    if mode == "synchronous":
        assert set(trainer.ages) == {0}


@pytest.mark.sweep
async def test_a_killed_trainer_is_followed_again_and_a_killed_generator_comes_back(tmp_path: Path) -> None:
    options = SimulationOptions(
        preset="echo-tiny",
        nodes=3,
        rounds=40,
        kill=(("ada", 3.0), ("bell", 5.0)),
        restart=True,
        minutes=2.5,
        overrides=("learner.checkpoint_every=3",),
    )
    done = await run(options, tmp_path)
    assert holds(done)
    change = mean_change(swarm_result(done), "all", own=True)
    assert change is not None
    trainer, bell, _ = swarm_result(done).nodes
    assert trainer.num_starts == 2 and bell.num_starts == 2
    started_s = [started.at_s for started in events_of(NodeStarted, done.nodes[1].events)]
    assert any(row.at_s > started_s[1] for row in bell.versions), "it follows again after its restart"
