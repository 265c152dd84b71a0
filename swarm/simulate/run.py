"""A real swarm on one machine: a coordinator and N node daemons as separate processes.

Invariant: what is reported comes from the nodes' own event files; this process only starts, disturbs,
watches and stops them.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from node.daemon import write_config
from swarm.config import CoordinatorConfig, NodeConfig, load_config
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs
from swarm.simulate.processes import POLL_S, Process, SimulationFailed, wait_for_file
from swarm.types import JsonDict, Role

RESTART_AFTER_S = 5.0
START_TIMEOUT_S = 120.0
FIRST_STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """What one node did, as its own event file and last status tell."""

    name: str
    node_id: str
    roles: tuple[Role, ...]
    asks: tuple[str, ...]
    events: tuple[JsonDict, ...]
    status: JsonDict
    num_starts: int


@dataclass(frozen=True, kw_only=True)
class SwarmRun:
    """A finished simulation."""

    options: SimulationOptions
    title: str
    nodes: tuple[NodeRun, ...]
    began_at_s: float  # wall clock
    first_step_at_s: float  # wall clock; everything before is set-up
    ended_at_s: float


Watch = Callable[[str, JsonDict], None]  # node name, event


async def run_swarm(options: SimulationOptions, directory: Path, watch: Watch, tick: Callable[[], None]) -> SwarmRun:
    """Runs a swarm until every node made its steps, or the time is up.

    Args:
        options: what to run.
        directory: state of every process goes below it; without that of an earlier run.
        watch: called with every event of every node as it appears.
        tick: called now and then, event or not.

    Raises:
        SimulationFailed: a process did not start or died unasked.
    """
    configs = node_configs(options, directory)
    began_s = time.time()
    coordinator = Process("coordinator", directory / "coordinator")
    nodes = {config.name: Process(config.name, config.dir) for config in configs}
    try:
        info = await _start_coordinator(coordinator, configs[0], directory)
        for config in configs:
            await _start_node(nodes[config.name], config, options, info)
        trainers = {config.name for config in configs if Role.TRAINER in config.roles}
        await _watch(coordinator, nodes, trainers, options, watch, tick)
        await asyncio.sleep(1.2)  # one more status.json of each node (written every second)
        statuses = {name: process.status() for name, process in nodes.items()}
    finally:
        await asyncio.gather(*(process.stop() for process in nodes.values()))
        await coordinator.stop()
        for process in nodes.values():
            process.read_events()
    return SwarmRun(
        options=options,
        title=PRESETS[options.preset].title,
        nodes=tuple(
            NodeRun(
                name=config.name,
                node_id=statuses[config.name].get("node_id", ""),
                roles=config.roles,
                asks=tuple(config.generator.asks),
                events=tuple(nodes[config.name].events),
                status=statuses[config.name],
                num_starts=nodes[config.name].num_starts,
            )
            for config in configs
        ),
        began_at_s=began_s,
        first_step_at_s=min(_step_times(nodes.values()), default=0.0),
        ended_at_s=time.time(),
    )


async def _start_coordinator(process: Process, node: NodeConfig, directory: Path) -> JsonDict:
    config = CoordinatorConfig(dir=process.directory, run_id=node.run_id, lease_s=10.0, node=node)
    process.directory.mkdir(parents=True, exist_ok=True)
    path = process.directory / "coordinator.toml"
    await asyncio.to_thread(write_config, config, path)
    await process.start(["coordinator.cli", "start", "--config", str(path)])
    info = await wait_for_file(process.directory / "coordinator.json", process, START_TIMEOUT_S)
    # a restart must come back on the same port: pin what was picked
    pinned = config.model_copy(update={"listen": info["listen"], "http_listen": info["http_listen"]})
    await asyncio.to_thread(write_config, pinned, path)
    return info


async def _start_node(process: Process, config: NodeConfig, options: SimulationOptions, info: JsonDict) -> None:
    directory = config.directory.model_copy(update={"bootstrap": tuple(info["bootstrap_peers"])})
    link = config.coordinator.model_copy(update={"address": info["listen"], "fingerprint": info["fingerprint"]})
    config = config.model_copy(update={"directory": directory, "coordinator": link})
    process.directory.mkdir(parents=True, exist_ok=True)
    path = process.directory / "node.toml"
    await asyncio.to_thread(write_config, config, path)
    overrides = [part for override in options.overrides for part in ("--set", override)]
    load_config(NodeConfig, path, list(options.overrides))  # a wrong --set stops here, with its own message
    await process.start(["node.cli", "start", "--config", str(path), *overrides])


async def _watch(
    coordinator: Process,
    nodes: dict[str, Process],
    trainers: set[str],
    options: SimulationOptions,
    watch: Watch,
    tick: Callable[[], None],
) -> None:
    """Follows the events until every node that trains has finished; carries out kills and restarts on time."""
    preset = PRESETS[options.preset]
    everyone = {**nodes, "coordinator": coordinator}
    finished: set[str] = set()
    has_begun = False
    pending = sorted(
        [(at_s, name, signal.SIGKILL) for name, at_s in options.kill]
        + [(at_s, name, signal.SIGSTOP) for name, at_s in options.stop]
    )
    restarts: list[tuple[float, str]] = []
    limit_s = 60 * (options.minutes or preset.max_minutes)
    began_s = time.monotonic()
    while not trainers <= finished:
        for name, process in nodes.items():
            for event in await asyncio.to_thread(process.read_events):
                watch(name, event)
                if event["kind"] == "step" and not has_begun:
                    has_begun, began_s = True, time.monotonic()
                if event["kind"] == "finished":
                    finished.add(name)
            process.check()
        coordinator.check()
        elapsed_s = time.monotonic() - began_s if has_begun else 0.0
        while pending and pending[0][0] <= elapsed_s and has_begun:
            _, name, number = pending.pop(0)
            everyone[name].send(number)
            watch(name, {"kind": "killed" if number == signal.SIGKILL else "stopped", "at_s": time.time()})
            if number == signal.SIGKILL and options.restart:
                restarts.append((elapsed_s + RESTART_AFTER_S, name))
            elif name in trainers:
                finished.add(name)
        while restarts and restarts[0][0] <= elapsed_s:
            _, name = restarts.pop(0)
            await everyone[name].start()
            watch(name, {"kind": "restarted", "at_s": time.time()})
        if has_begun and elapsed_s > limit_s:
            break
        if not has_begun and time.monotonic() - began_s > FIRST_STEP_TIMEOUT_S:
            raise SimulationFailed(f"no step within {FIRST_STEP_TIMEOUT_S:.0f} s; see the log.txt of each node")
        tick()
        await asyncio.sleep(POLL_S)


def _step_times(processes: Iterable[Process]) -> list[float]:
    """Wall clock of every step; only all events together tell which was first."""
    return [event["at_s"] for process in processes for event in process.events if event["kind"] == "step"]
