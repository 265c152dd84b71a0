"""Processes killed with -9 and terminated: what comes back, what is kept, and what is left behind."""

import asyncio
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from waits import HANG_S

from swarm.events import Event, LoopFailed, NodeKilled, NodeStarted, StepMade, events_of, kind_of
from swarm.simulate.command import judge
from swarm.simulate.local.processes import Process
from swarm.simulate.local.run import NodeRun, run_swarm
from swarm.simulate.presets import SimulationOptions

pytestmark = pytest.mark.asyncio(loop_scope="session")


def stored(directory: Path) -> set[str]:
    """Digests of every group in a node's store."""
    with sqlite3.connect(f"file:{directory / 'groups.sqlite'}?mode=ro", uri=True) as database:
        return {row[0].hex() for row in database.execute("SELECT digest FROM groups")}


@pytest.mark.usefixtures("shared_forks")
async def test_a_node_killed_in_the_middle_comes_back_from_its_disk(tmp_path: Path) -> None:
    every = 5
    quick = ("evaluation.num_problems=2", f"learner.checkpoint_every={every}", "faults.slow_factor=3")
    options = SimulationOptions(preset="tiny", nodes=2, rounds=40, kill=(("ada", 2.0),), restart=True, overrides=quick)
    seen: list[tuple[str, str]] = []
    kept: set[str] = set()

    def watch(name: str, event: Event) -> None:
        seen.append((name, kind_of(event)))
        if name == "ada" and isinstance(event, NodeKilled):
            kept.update(stored(tmp_path / "ada"))

    run = await run_swarm(options, tmp_path, watch, lambda activities: None)
    ada, bell = run.nodes
    assert ("ada", "killed") in seen
    assert ada.num_starts == 2
    assert [verdict for verdict in judge([run]).verdicts() if not verdict.holds] == []
    assert kept
    assert kept <= stored(tmp_path / "ada"), "a stored group was lost"
    _check_repeats(ada, every)
    _check_no_wait(bell, ada)
    assert run.first_step_at_s <= events_of(StepMade, bell.events)[0].at_s


def _check_repeats(node: NodeRun, checkpoint_every: int) -> None:
    second_start_s = events_of(NodeStarted, node.events)[1].at_s
    steps = events_of(StepMade, node.events)
    before = [event.step for event in steps if event.at_s < second_start_s]
    after = [event.step for event in steps if event.at_s >= second_start_s]
    assert before
    assert after[-1] == node.status["step"] == 40
    repeated = set(before) & set(after)
    assert len(repeated) <= checkpoint_every
    assert after == list(range(after[0], 41)), "a step was left out"
    digests = {event.step: event.digest for event in steps if event.at_s < second_start_s}
    for event in steps:
        if event.step in repeated and event.at_s >= second_start_s:
            assert event.digest == digests[event.step], "a repeated step led to other weights"


def _check_no_wait(node: NodeRun, killed: NodeRun) -> None:
    """A node makes steps, or its last one, between the last step of a killed node and its second start."""
    second_start_s = events_of(NodeStarted, killed.events)[1].at_s
    last_s = max(event.at_s for event in events_of(StepMade, killed.events) if event.at_s < second_start_s)
    at_s = [event.at_s for event in events_of(StepMade, node.events)]
    alone = [each for each in at_s if last_s < each < second_start_s]
    assert len(alone) >= 3 or (alone and len(at_s) == node.status["step"]), "it waited for the one that was dead"


async def test_the_ledger_is_complete_after_the_coordinator_was_killed(swarm: Any) -> None:
    first, second = swarm.configs(2)
    info = await swarm.coordinator(first)
    nodes = [await swarm.node(first, info=info), await swarm.node(second, info=info)]
    coordinator: Process = swarm.processes["coordinator"]
    await swarm.until(lambda: all(node.status()["step"] >= 3 for node in nodes), "no node made 3 steps")
    coordinator.send(signal.SIGKILL)
    killed_s = time.time()
    at_kill = [node.status()["step"] for node in nodes]
    path = coordinator.directory / "coordinator.sqlite"
    await swarm.until(
        lambda: all(node.status()["step"] >= step + 5 for node, step in zip(nodes, at_kill, strict=True)),
        "a node stopped without a coordinator",
    )
    (coordinator.directory / "coordinator.json").unlink()
    await coordinator.start()
    target = [node.status()["step"] for node in nodes]

    def is_complete() -> bool:
        return all(
            recorded(path, node.status()["node_id"]).keys() >= set(range(step + 1))
            for node, step in zip(nodes, target, strict=True)
        )

    await swarm.until(is_complete, "the ledger lacks versions")
    await asyncio.gather(*(node.stop() for node in nodes))  # a drain hands in the newest ones
    for node in nodes:
        node.read_events()
        assert any(event.at_s > killed_s for event in events_of(StepMade, node.events))
        versions = recorded(path, node.status()["node_id"])
        published = {event.step: event.digest for event in events_of(StepMade, node.events)}
        assert {step: versions.get(step) for step in published} == published
        assert events_of(LoopFailed, node.events) == []


def recorded(path: Path, node_id: str) -> dict[int, str]:
    """Step -> digest of every version of a node in the coordinator's database."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT step, digest FROM versions WHERE policy_id = ? AND NOT is_rewind", (node_id,))
        return {step: digest.hex()[:16] for step, digest in rows}


async def test_an_ended_daemon_leaves_nothing_and_a_worker_that_outlived_it_meets_no_other(swarm: Any) -> None:
    (config,) = swarm.configs(1)
    process = await swarm.node(config.model_copy(update={"worker": "process"}))
    await swarm.until(lambda: process.status()["step"] >= 1, "no step was made")
    (first,) = config.dir.glob("agent-*.sock")
    await _kill_alone(process)
    assert first.exists(), "the killed agent cannot have removed it"

    await process.start()
    await swarm.until(lambda: not first.exists(), "the old socket is still there")
    outlived = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node.worker", "--config", str(config.dir / "worker.toml")),
        *("--socket", str(first), "--parent", "1"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await outlived.communicate()
    assert outlived.returncode == 1
    assert b"the process that started this one (1) is gone" in said
    await _terminate(swarm, process, has_worker=True)


async def test_sigterm_drains_a_node_of_one_process(swarm: Any) -> None:
    (config,) = swarm.configs(1)
    process = await swarm.node(config.model_copy(update={"worker": "inline"}))
    await _terminate(swarm, process, has_worker=False)


async def _terminate(swarm: Any, process: Process, has_worker: bool) -> None:
    """SIGTERM to the daemon alone once a step is made: it drains, and takes all it started along."""
    await swarm.until(lambda: made_a_step(process), "no step was made")
    daemon = psutil.Process(process.status()["pid"])
    children = daemon.children(recursive=True)
    names = " ".join(" ".join(child.cmdline()) for child in children)
    assert "p2pd" in names
    assert ("node.worker" in names) == has_worker
    daemon.send_signal(signal.SIGTERM)
    process.is_expected_dead = True
    await swarm.until(lambda: not process.is_alive, "the daemon goes on after SIGTERM")
    assert process._process is not None
    assert process._process.returncode == 0
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert alive == []


def made_a_step(process: Process) -> bool:
    """True if the newest start of a node has made a step."""
    process.read_events()
    kinds = [kind_of(event) for event in process.events if isinstance(event, (NodeStarted, StepMade))]
    is_started = kinds.count("started") == process.num_starts and bool(process.status())
    return is_started and kinds[-1] == "step"


async def _kill_alone(process: Process) -> None:
    """SIGKILL to the daemon only, as the system does when memory is short; all it started ends with it."""
    daemon = psutil.Process(process.status()["pid"])
    children = daemon.children(recursive=True)
    process.is_expected_dead = True
    (worker,) = [child for child in children if "node.worker" in child.cmdline()]
    worker.suspend()  # so busy that it does not look at its agent
    daemon.kill()
    await asyncio.to_thread(worker.wait, 20.0)
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 20.0)
    assert [child.cmdline() for child in alive] == []
