"""`swarm pause` and `swarm resume` of a real node: what stops, what stays, and what every command says meanwhile."""

import asyncio
import json
import re
import sqlite3
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner
from waits import until

from node.daemon import Daemon, write_config
from node.pause import PAUSED
from node.status import problems, read_status
from swarm.cli.main import app
from swarm.config import NODE_FILE, DirectoryConfig, EnvironmentConfig, EvaluationConfig, ModelConfig, NodeConfig
from swarm.events import DrawsAbandoned, LoopFailed, StepMade, events_of
from swarm.report.watch import WatchedNode
from swarm.simulate.local.processes import Process
from swarm.telemetry import read_events

RUN = CliRunner()
IDLE_S = 2.0


def config_of(directory: Path) -> NodeConfig:
    return NodeConfig(
        dir=directory,
        run_id="test",
        worker="inline",
        environments=(EnvironmentConfig(name="reverse", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny", dtype="float32"),
        directory=DirectoryConfig(kind="none"),
        evaluation=EvaluationConfig(num_problems=2),
    )


async def command(*arguments: str) -> tuple[int, str]:
    result = await asyncio.to_thread(RUN.invoke, app, [*arguments])
    return result.exit_code, result.output


def stored(directory: Path) -> set[bytes]:
    with sqlite3.connect(f"file:{directory / 'groups.sqlite'}?mode=ro", uri=True) as database:
        return {row[0] for row in database.execute("SELECT digest FROM groups")}


async def run(config: NodeConfig) -> tuple[Daemon, "asyncio.Task[None]"]:
    daemon = Daemon(config)
    await daemon.__aenter__()
    return daemon, asyncio.create_task(daemon.run())


async def stop(daemon: Daemon, running: "asyncio.Task[None]") -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await daemon.__aexit__()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


async def until_step(daemon: Daemon, step: int) -> None:
    await until(lambda: daemon.agent.head.step >= step, f"step {step}")


async def standstill(daemon: Daemon) -> int:
    """The step at which it stands still, once what was under way has ended."""
    while True:
        before = daemon.agent.head.step, daemon.agent.own_groups.num_put
        await asyncio.sleep(IDLE_S)
        if before == (daemon.agent.head.step, daemon.agent.own_groups.num_put):
            return before[0]


async def test_a_paused_node_does_nothing_says_so_outlives_a_restart_and_loses_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path / "node")
    config.dir.mkdir(mode=0o700)
    await asyncio.to_thread(write_config, config, config.dir / NODE_FILE)
    path = str(config.dir)
    daemon, running = await run(config)
    try:
        await until_step(daemon, 2)
        code, said = await command("pause", path)
        assert code == 0 and "paused since 20" in said, said
        step = await standstill(daemon)
        kept = await asyncio.to_thread(stored, config.dir)
        waiting = daemon.agent.replay.digests
        cpu = psutil.Process().cpu_times()
        await asyncio.sleep(IDLE_S)
        used = psutil.Process().cpu_times()
        assert used.user + used.system - cpu.user - cpu.system < 0.25 * IDLE_S, "it gives the CPU back"
        await asyncio.sleep(1.1)  # a status of now
        assert (await command("pause", path))[1] == said, "the first pause is the one that counts"
        code, said = await command("status", "--dir", path)
        assert code == 0 and re.search(r"paused +since 20.*swarm resume", said), said
        code, said = await command("why", path)
        assert code == 0 and "the node is paused since 20" in said and f"swarm resume {path}" in said.replace("\n", "")
        watched = WatchedNode(config.dir)
        await asyncio.to_thread(watched.refresh, time.time())
        assert watched.state == "paused" and watched.problems == ()
        status = read_status(config.dir)
        assert problems(status, time.time() + 14, 0.0) == [], "standing still is what it was asked for"
        assert status["written_bytes"] is not None
    finally:
        await stop(daemon, running)

    daemon, running = await run(config)
    try:
        assert daemon.agent.is_paused
        assert await standstill(daemon) == 0, "a node that is started while it is paused loads no model"
        assert waiting <= daemon.agent.replay.digests
        code, said = await command("resume", path)
        assert code == 0 and "goes on, after a pause since 20" in said, said
        assert not (config.dir / PAUSED).exists()
        await until_step(daemon, step + 2)
        assert kept <= await asyncio.to_thread(stored, config.dir), "a stored group was lost"
    finally:
        await stop(daemon, running)
    events = await asyncio.to_thread(lambda: [*read_events(config.dir / "events.jsonl")])
    assert not events_of(DrawsAbandoned, events) and not events_of(LoopFailed, events)
    steps = [event.step for event in events_of(StepMade, events)]
    assert steps == [*range(1, len(steps) + 1)], "none was left out, and a stop made none again"
    code, said = await command("resume", path)
    assert code == 0 and "it was not paused (the node does not run)" in said


@pytest.mark.sweep
@pytest.mark.asyncio(loop_scope="session")
async def test_others_go_on_beside_a_paused_node_and_it_joins_them_again(swarm: Any) -> None:
    configs = swarm.configs(2)
    info = await swarm.coordinator(configs[0])
    ada, bell = [await swarm.node(config, info=info) for config in configs]

    def count(node: Process, key: str) -> int:
        found = node.status().get(key, 0)
        return len(found) if isinstance(found, list) else found

    await swarm.until(lambda: min(count(node, "num_external_used") for node in (ada, bell)) > 0, "they do not share")
    code, said = await command("pause", str(ada.directory))
    assert code == 0 and "goes on" in said, said
    await swarm.until(lambda: not count(ada, "peers"), "it still takes in groups")
    step, made, used = count(ada, "step"), count(bell, "step"), count(ada, "num_external_used")
    await swarm.until(lambda: count(bell, "step") >= made + 10, "the other node waits for the paused one")
    assert count(ada, "step") <= step + 1, "the step that was under way is the last"
    members = json.loads(await asyncio.to_thread(_read, f"http://{info['http_listen']}/status.json"))["members"]
    assert {member["node_id"] for member in members} >= {ada.status()["node_id"]}, "it keeps its place"
    code, said = await command("resume", str(ada.directory))
    assert code == 0, said
    await swarm.until(lambda: count(ada, "step") >= step + 3, "it does not go on")
    await swarm.until(lambda: count(ada, "num_external_used") > used, "it takes in nothing any more")


async def test_a_pause_of_what_is_no_node_is_a_line(tmp_path: Path) -> None:
    for name in ("pause", "resume"):
        code, said = await command(name, str(tmp_path))
        assert code == 2 and not said.startswith("Traceback")
    assert await asyncio.to_thread(lambda: [*tmp_path.iterdir()]) == []
