"""`--deterministic` over real processes: a node killed with -9 and restarted has the curve of one left alone."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from waits import until

from node.daemon import write_config
from swarm.config import EnvironmentConfig, FaultConfig, NodeConfig
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
from swarm.report.invariants import Invariants
from swarm.simulate.local.fork_server import ForkServer
from swarm.simulate.local.processes import Process
from swarm.simulate.presets import SimulationOptions, node_configs

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
            await until(lambda least=number: count() >= least, f"event {number}", processes=(process,))
            if what == "worker":
                await asyncio.to_thread(kill_worker, process)
                continue
            process.send(signal.SIGKILL)
            await until(lambda: not process.is_alive, "its end")
            await process.start()
        await until(
            lambda: bool(count() and events_of(NodeFinished, process.events)), "its last step", processes=(process,)
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
    """The figures of every step, those made again among them."""
    made = events_of(StepMade, events)
    return [(e.draw_step, e.step, e.digest, e.loss, e.grad_norm, e.num_tokens) for e in made]


def evaluations(events: list[Event]) -> dict[tuple[object, ...], float]:
    """Accuracy by step, environment and split."""
    return {(e.step, e.env, e.split): e.accuracy for e in events_of(PolicyEvaluated, events)}


@pytest.mark.sweep
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


@pytest.mark.sweep
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


# --- killed between two turns -----------------------------------------------------------------------------

NUM_SHORT_STEPS = 4
MOMENTS = ("asked", "answered")  # the environment, after a first turn; its answer is there, and not in the cache yet
PARKED = '''
import os, signal
from pathlib import Path
from swarm.generation.episode_player import EpisodePlayer
from swarm.objectives.methods.grpo import RECIPE

MARKS = Path(__file__).with_name("marks.txt")
with MARKS.with_name("starts.txt").open("a") as file:
    file.write(f"{os.getpid()} ")
PLAYERS = []
observe, observation = EpisodePlayer.observe, EpisodePlayer._observation


def die(moment, player, rollout):
    """SIGKILL in the second batch of a process, once for each moment, while most of its episodes have begun."""
    if len(player._tasks) < NUM_ROWS or len(player._actions[rollout]) != 1:
        return  # an evaluation is smaller
    if player not in PLAYERS:
        PLAYERS.append(player)
    have_most_begun = 2 * sum(map(bool, player._actions)) > NUM_ROWS
    if len(PLAYERS) == 2 and have_most_begun and moment not in MARKS.read_text():
        with MARKS.open("a") as file:
            file.write(moment + " ")
        os.kill(os.getpid(), signal.SIGKILL)


def asked(player, rollout, *rest):
    answer = observe(player, rollout, *rest)
    die("asked", player, rollout)
    return answer


def answered(player, rollout, *rest):
    found = observation(player, rollout, *rest)
    die("answered", player, rollout)
    return found


EpisodePlayer.observe, EpisodePlayer._observation = asked, answered
'''


async def run_parked(forks: ForkServer | None, directory: Path, identity: Identity, kills: bool) -> list[Event]:
    """Events of a node that is killed at each of the moments, or at none, and started again."""
    config = config_of(directory, "inline", has_episodes=True)
    num_rows = config.generator.group_size * config.replay.local_groups
    (directory / "parked.py").write_text(PARKED.replace("NUM_ROWS", str(num_rows)))
    (directory / "marks.txt").write_text("" if kills else " ".join(MOMENTS))
    learner = {"recipe": f"{directory / 'parked.py'}:RECIPE", "recipe_params": {}, "num_steps": NUM_SHORT_STEPS}
    changes = {"learner": config.learner.model_copy(update=learner), "faults": FaultConfig()}
    return await run_to_its_end(forks, config.model_copy(update=changes), identity)


async def run_to_its_end(forks: ForkServer | None, config: NodeConfig, identity: Identity) -> list[Event]:
    """Events of a node that is started again whenever it was killed."""
    config.dir.mkdir(parents=True)
    identity.save(config.dir / "identity.key")
    write_config(config, config.dir / "node.toml")
    process = Process(config.name, config.dir, forks)

    def is_over() -> bool:
        process.read_events()
        return not process.is_alive or bool(events_of(NodeFinished, process.events))

    try:
        for _ in range(1 + len(MOMENTS)):
            await process.start(["node.cli", "start", "--config", str(config.dir / "node.toml")])
            process.is_expected_dead = True
            await until(is_over, "its death or its last step", processes=(process,))
            if process.is_alive:
                break
    finally:
        await process.stop()
    process.read_events()
    return process.events


async def test_a_node_killed_between_two_turns_of_its_episodes_loses_and_doubles_nothing(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    identity = await asyncio.to_thread(Identity.create)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = await asyncio.gather(
        run_parked(forks, tmp_path / "whole", identity, kills=False),
        run_parked(forks, tmp_path / "killed", identity, kills=True),
    )
    assert sorted((tmp_path / "killed" / "marks.txt").read_text().split()) == sorted(MOMENTS)
    # Counted by the processes themselves, whether or not one came to write NodeStarted before its SIGKILL.
    starts = {name: len(set((tmp_path / name / "starts.txt").read_text().split())) for name in ("whole", "killed")}
    assert starts == {"whole": 1, "killed": 1 + len(MOMENTS)}
    assert [row[1] for row in steps(whole)] == list(range(1, NUM_SHORT_STEPS + 1))
    assert sorted(set(steps(killed))) == steps(whole)
    assert evaluations(killed) == evaluations(whole)
    asked = [[put.num_tokens for put in events_of(GroupPut, events)] for events in (whole, killed)]
    assert asked[0] == asked[1], "a question was asked twice, or not at all"
    assert min(asked[0]) > 0 and len({put.digest for put in events_of(GroupPut, killed)}) == len(asked[1])
    invariants = Invariants(repeats_exactly=True)
    for event in killed:
        invariants.check(identity.node_id, event)
    invariants.finish({identity.node_id: NUM_SHORT_STEPS})
    assert invariants.hold, invariants.violations
