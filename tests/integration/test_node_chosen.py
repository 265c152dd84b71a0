"""A whole node whose recipe chooses its questions, and one that compares with greedy answers."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from waits import until

from node.daemon import write_config
from swarm.config import NodeConfig
from swarm.events import GroupPut, LoopFailed, NodeFinished, StepMade, events_of
from swarm.identity import Identity
from swarm.simulate.local.fork_server import ForkServer
from swarm.simulate.local.processes import Process
from swarm.simulate.presets import SimulationOptions, node_configs
from swarm.types import JsonDict

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_STEPS = 4
NUM_TASKS = 200


def config_of(directory: Path, recipe: str) -> NodeConfig:
    """One tiny node that knows nobody and trains in turn."""
    options = SimulationOptions(preset="tiny", nodes=1, rounds=NUM_STEPS, deterministic=True, seed=3)
    (config,) = node_configs(options, directory)
    changes = {
        "directory": config.directory.model_copy(update={"kind": "none"}),
        "evaluation": config.evaluation.model_copy(update={"num_problems": 2}),
        "environments": tuple(each.model_copy(update={"num_tasks": NUM_TASKS}) for each in config.environments),
        "generator": config.generator.model_copy(update={"group_size": 4, "largest_group": 12}),
        "replay": config.replay.model_copy(update={"local_groups": 4, "keep_zero_variance": True}),
        "learner": config.learner.model_copy(update={"recipe": recipe, "recipe_params": {}, "checkpoint_every": 2}),
    }
    return config.model_copy(update=changes)


async def run_node(
    forks: ForkServer | None, directory: Path, identity: Identity, recipe: str, kill_after: tuple[int, ...] = ()
) -> Process:
    """A finished node, killed as soon as each of these numbers of groups and steps was seen."""
    config = config_of(directory, recipe)
    config.dir.mkdir(parents=True)
    identity.save(config.dir / "identity.key")
    write_config(config, config.dir / "node.toml")
    process = Process(config.name, config.dir, forks)

    def count() -> int:
        process.read_events()
        return sum(isinstance(event, (GroupPut, StepMade)) for event in process.events)

    try:
        await process.start(["node.cli", "start", "--config", str(config.dir / "node.toml")])
        for number in kill_after:
            await until(lambda least=number: count() >= least, f"event {number}", processes=(process,))
            process.send(signal.SIGKILL)
            await until(lambda: not process.is_alive, "its end")
            await process.start()
        await until(
            lambda: bool(count() and events_of(NodeFinished, process.events)), "its last step", processes=(process,)
        )
    finally:
        await process.stop()
    return process


def curve(process: Process) -> set[tuple[object, ...]]:
    """The figures of every step."""
    steps = events_of(StepMade, process.events)
    return {(e.draw_step, e.step, e.digest, e.loss, e.num_tokens) for e in steps}


def remembered(directory: Path) -> JsonDict:
    (path,) = directory.rglob("questions.json")
    return json.loads(path.read_text(encoding="utf-8"))


async def test_a_whole_node_chooses_its_questions_or_compares_with_greedy_answers(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    identity = await asyncio.to_thread(Identity.create)
    whole, killed, mixing, greedy = await asyncio.gather(
        run_node(forks, tmp_path / "whole", identity, "rollout_gdro"),
        run_node(forks, tmp_path / "killed", identity, "rollout_gdro", kill_after=(7,)),
        run_node(forks, tmp_path / "mixing", identity, "reinforce_ada"),
        run_node(forks, tmp_path / "greedy", identity, "remax"),
    )
    _check_the_killed_one_chose_the_same(whole, killed, tmp_path)
    assert len(curve(mixing)) == len(curve(greedy)) == NUM_STEPS
    tokens = [put.num_tokens for put in events_of(GroupPut, mixing.events)]
    assert max(tokens) > 4 * 9, "no group is larger than the group size at its longest: none was answered again"
    assert not events_of(LoopFailed, greedy.events)


def _check_the_killed_one_chose_the_same(whole: Process, killed: Process, tmp_path: Path) -> None:
    assert len(curve(whole)) == NUM_STEPS
    assert curve(killed) == curve(whole)
    assert remembered(tmp_path / "killed") == remembered(tmp_path / "whole")
    state = remembered(tmp_path / "whole")["states"][-1]
    assert len(state["memory"]["prompts"]) > 0.5 * state["number"]
    sizes = [responses for entry in state["memory"]["prompts"].values() for _, responses in entry["groups"]]
    assert all(2 <= size <= 12 for size in sizes)
