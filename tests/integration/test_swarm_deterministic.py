"""`--deterministic` over real processes: a node killed with -9 and restarted has the curve of one left alone."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from node.daemon import write_config
from swarm.config import EnvironmentConfig, NodeConfig
from swarm.events import (
    Event,
    GroupPut,
    GroupsDrawn,
    NodeFinished,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    WorkerDied,
    events_of,
)
from swarm.identity import Identity
from swarm.simulate.local.fork_server import ForkServer
from swarm.simulate.local.processes import Process, wait_until
from swarm.simulate.presets import SimulationOptions, node_configs

pytestmark = [pytest.mark.timeout(150), pytest.mark.asyncio(loop_scope="session")]

NUM_STEPS = 12

RETRY = EnvironmentConfig(name="again", kind="retry", params={"inner": {"kind": "char", "dataset": "sort"}})
ACTION_TOKENS = 6  # most of a turn, where episodes are played

Kill = tuple[int, str]  # when so many groups, draws and steps were seen: the whole node, or its worker alone


def config_of(directory: Path, worker: str, *, has_episodes: bool = False) -> NodeConfig:
    """One tiny node that knows nobody; its engine parks the rows of episodes between their turns."""
    options = SimulationOptions(preset="tiny", nodes=1, rounds=NUM_STEPS, deterministic=True, seed=3)
    (config,) = node_configs(options, directory)
    changes = {
        "worker": worker,
        "directory": config.directory.model_copy(update={"kind": "none"}),
        "evaluation": config.evaluation.model_copy(update={"num_problems": 4, "every_steps": 3}),
        "learner": config.learner.model_copy(update={"checkpoint_every": 4}),
        "faults": config.faults.model_copy(update={"slow_factor": 4.0}),  # time to be killed in
    }
    if has_episodes:
        limits = {"env_weights": {}, "max_new_tokens": ACTION_TOKENS, "max_episode_tokens": 64}
        changes |= {"environments": (RETRY,), "generator": config.generator.model_copy(update=limits)}
        changes["evaluation"] = config.evaluation.model_copy(
            update={"num_problems": 4, "every_steps": 3, "num_tries": 2, "environments": ()}
        )
    return config.model_copy(update=changes)


async def run_node(
    forks: ForkServer | None,
    directory: Path,
    identity: Identity,
    worker: str,
    kills: tuple[Kill, ...] = (),
    *,
    has_episodes: bool = False,
) -> list[Event]:
    """Events of a node that has made its steps, whatever was killed meanwhile."""
    config = config_of(directory, worker, has_episodes=has_episodes)
    config.dir.mkdir(parents=True)
    identity.save(config.dir / "identity.key")
    write_config(config, config.dir / "node.toml")
    process = Process(config.name, config.dir, forks)

    def count() -> int:
        process.read_events()
        return sum(isinstance(event, (GroupPut, GroupsDrawn, StepMade)) for event in process.events)

    try:
        await process.start(["node.cli", "start", "--config", str(config.dir / "node.toml")])
        for number, what in kills:
            await wait_until(lambda least=number: count() >= least, 60.0, f"no {number} events", process)
            if what == "worker":
                await asyncio.to_thread(kill_worker, process)
                continue
            process.send(signal.SIGKILL)
            await wait_until(lambda: not process.is_alive, 10.0, "it lives on")
            await process.start()
        await wait_until(
            lambda: bool(count() and events_of(NodeFinished, process.events)), 90.0, "it does not finish", process
        )
    finally:
        await process.stop()
    return process.events


def kill_worker(process: Process) -> None:
    """Ends the worker alone; its agent starts another one."""
    agent = psutil.Process(process.status()["pid"])
    (worker,) = [child for child in agent.children() if "node.worker" in child.cmdline()]
    worker.kill()


def steps(events: list[Event]) -> list[tuple[object, ...]]:
    """What every step did, those made again among them."""
    made = events_of(StepMade, events)
    return [(e.draw_step, e.step, e.digest, e.loss, e.grad_norm, e.num_tokens) for e in made]


def evaluations(events: list[Event]) -> dict[tuple[object, ...], float]:
    """Accuracy by step, environment and split."""
    return {(e.step, e.env, e.split): e.accuracy for e in events_of(PolicyEvaluated, events)}


async def test_a_killed_run_equals_an_undisturbed_one(tmp_path: Path, forks: ForkServer | None) -> None:
    identity = await asyncio.to_thread(Identity.create)
    kills: dict[str, tuple[Kill, ...]] = {
        "inline": ((9, "node"), (23, "node")),
        "process": ((8, "worker"), (21, "node")),
    }
    whole, *killed = await asyncio.gather(
        run_node(forks, tmp_path / "whole", identity, "inline"),
        *(run_node(forks, tmp_path / worker, identity, worker, kills[worker]) for worker in kills),
    )
    assert [row[1] for row in steps(whole)] == list(range(1, NUM_STEPS + 1))
    assert len({row[2] for row in steps(whole)}) == NUM_STEPS
    assert {step for step, _, _ in evaluations(whole)} == {0, 3, 6, 9, 12}
    for events, what in zip(killed, kills.values(), strict=True):
        assert len(events_of(NodeStarted, events)) == 1 + sum(each == "node" for _, each in what)
        assert len(events_of(WorkerDied, events)) == sum(each == "worker" for _, each in what)
        assert sorted(set(steps(events))) == steps(whole)
        assert evaluations(events) == evaluations(whole)


async def test_a_run_of_episodes_that_was_killed_equals_an_undisturbed_one(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    identity = await asyncio.to_thread(Identity.create)
    kills: tuple[Kill, ...] = ((9, "node"), (17, "worker"), (23, "node"))
    whole, killed = await asyncio.gather(
        run_node(forks, tmp_path / "whole", identity, "inline", has_episodes=True),
        run_node(forks, tmp_path / "killed", identity, "process", kills, has_episodes=True),
    )
    assert [row[1] for row in steps(whole)] == list(range(1, NUM_STEPS + 1))
    group_size = config_of(tmp_path, "inline").generator.group_size
    assert max(put.num_tokens for put in events_of(GroupPut, whole)) > group_size * ACTION_TOKENS, "no second turn"
    assert len(events_of(NodeStarted, killed)) == 3 and len(events_of(WorkerDied, killed)) == 1
    assert sorted(set(steps(killed))) == steps(whole)
    assert evaluations(killed) == evaluations(whole)
