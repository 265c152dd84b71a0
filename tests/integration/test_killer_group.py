"""A group that ends whoever learns from it, in the journal of a real node."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from waits import until

from node.daemon import write_config
from swarm.config import NodeConfig
from swarm.events import Event, GroupGivenUp, GroupsDrawn, NodeFinished, StepMade, WorkerDied, events_of
from swarm.simulate.local.fork_server import ForkServer
from swarm.simulate.local.processes import Process, SimulationFailed
from swarm.simulate.presets import SimulationOptions, node_configs

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_STEPS = 6
RECIPE = '''
import hashlib, os, signal
from dataclasses import replace
from pathlib import Path
from swarm.objectives.methods.grpo import RECIPE as GRPO
from swarm.objectives.parts import GroupZScore

MARK = Path(__file__).with_name("mark.txt")


def names(batch):
    """What each group of a batch is known by."""
    for index in range(len(batch.task_keys)):
        texts = [text for text, group in zip(batch.texts, batch.group_index.tolist()) if group == index]
        yield hashlib.sha256(repr((batch.task_keys[index], texts)).encode()).hexdigest()


class Deadly(GroupZScore):
    """Marks one group of the third batch; whoever computes with it is gone."""

    def __call__(self, batch):
        seen = [*names(batch)]
        if not MARK.exists():
            with MARK.with_name("batches.txt").open("a+") as file:
                file.write("x")
                file.seek(0)
                if len(file.read()) == 3:
                    MARK.write_text(seen[-1])
        if MARK.exists() and MARK.read_text() in seen:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


RECIPE = replace(GRPO, name="deadly", advantage=Deadly())
'''


def config_of(folder: Path, worker: str) -> NodeConfig:
    (folder / "deadly.py").write_text(RECIPE)
    options = SimulationOptions(preset="tiny", nodes=1, rounds=NUM_STEPS, seed=3)
    (config,) = node_configs(options, folder)
    changes = {
        "worker": worker,
        "directory": config.directory.model_copy(update={"kind": "none"}),
        "evaluation": config.evaluation.model_copy(update={"num_problems": 2, "every_steps": 0}),
        "replay": config.replay.model_copy(update={"keep_zero_variance": True}),
        "learner": config.learner.model_copy(
            update={"checkpoint_every": 2, "recipe": f"{folder / 'deadly.py'}:RECIPE", "recipe_params": {}}
        ),
    }
    return config.model_copy(update=changes)


async def run_until(process: Process, is_over: Callable[[list[Event]], bool], max_starts: int) -> None:
    """Runs a node on, starting it again whenever it dies, as a supervisor of processes would."""

    def has_come() -> bool:
        process.read_events()
        return is_over(process.events) or not process.is_alive

    process.is_expected_dead = True
    while True:
        await until(has_come, "its death or its last step", processes=(process,))
        if is_over(process.events):
            return
        if process.num_starts >= max_starts:
            raise SimulationFailed("it died too often")
        await process.start()
        process.is_expected_dead = True


@pytest.mark.parametrize(("worker", "max_starts"), [pytest.param("process", 1, marks=pytest.mark.sweep), ("inline", 5)])
async def test_a_node_gives_up_the_one_group_that_kills_it(
    tmp_path: Path, forks: ForkServer | None, worker: str, max_starts: int
) -> None:
    config = config_of(tmp_path, worker)
    config.dir.mkdir(parents=True)
    write_config(config, config.dir / "node.toml")
    process = Process(config.name, config.dir, forks)
    try:
        await process.start(["node.cli", "start", "--config", str(config.dir / "node.toml")])
        await run_until(process, lambda events: bool(events_of(NodeFinished, events)), max_starts)
        process.read_events()
    finally:
        await process.stop()
    if worker == "inline":
        assert process.num_starts - 1 == 4, "twice in the step, twice in a trial: once could be the machine"
    else:
        assert len(events_of(WorkerDied, process.events)) == 3, "twice in the step, once in a trial"
    (given_up,) = events_of(GroupGivenUp, process.events)
    assert given_up.producer == process.status()["node_id"]
    drawn = {event.draw_step: [use.digest for use in event.groups] for event in events_of(GroupsDrawn, process.events)}
    uses = [digest for digests in drawn.values() for digest in digests]
    assert given_up.digest in drawn[given_up.draw_step] and len(set(uses)) == len(uses)
    made = {event.draw_step: event for event in events_of(StepMade, process.events)}
    assert len(made[given_up.draw_step].ages_steps) == len(drawn[given_up.draw_step]) - 1, "the rest of it was used"
    whole = [len(event.ages_steps) == len(drawn[draw]) for draw, event in made.items() if draw != given_up.draw_step]
    assert all(whole) and len(whole) >= NUM_STEPS - 1
    log = await asyncio.to_thread((config.dir / "log.txt").read_text)
    assert "a group ended the process alone and is given up" in log
