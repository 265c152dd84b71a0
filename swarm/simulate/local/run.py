"""A local swarm: a coordinator and N node daemons as separate processes of one machine.

Invariant: every reported number comes from the nodes' own files; this process only starts, disturbs, watches and stops
them.
"""

import asyncio
import json
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from node.daemon import write_config
from node.status import waits_for
from swarm.config import NODE_FILE, CoordinatorConfig, EntryConfig, NodeConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.events import (
    Event,
    GroupPut,
    GroupUnscored,
    NodeFinished,
    NodeKilled,
    NodeRestarted,
    NodeStarted,
    NodeStopped,
    StepMade,
    WorkerDied,
    events_of,
)
from swarm.process import load_or_create_identity, make_private
from swarm.simulate.local.fork_server import OF_AGENTS, OF_WORKERS, fork_server
from swarm.simulate.local.processes import POLL_S, Process, SilenceWatch, SimulationFailed
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs
from swarm.telemetry.shown_episodes import ShownEpisode, read_episodes
from swarm.types import JsonDict, Role
from swarm.wire.run_manifest import manifest_of

RESTART_AFTER_S = 5.0
LOOK_S = 1.0  # for signs of life; status.json is written as often
MANY_UNSCORED = 32
MANY_DEATHS = 12  # of a worker without a step: a group that kills is found after 3, a step is left out after 10
HEAVY = ("checkpoints", "weights", "engine")  # of a node's directory: gigabytes that only a restart would read


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFault:
    """A planned kill, stop or restart of one process, `at_s` seconds after the run's first step."""

    at_s: float
    kind: Literal["kill", "stop", "restart"]
    name: str  # of a node, or `coordinator`


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """Events and last status of one node."""

    name: str
    node_id: str
    roles: tuple[Role, ...]
    curriculum: tuple[str, ...]
    events: tuple[Event, ...]
    status: JsonDict
    num_starts: int
    episodes: tuple[ShownEpisode, ...] = ()  # of its first and newest evaluation


@dataclass(frozen=True, kw_only=True)
class SwarmRun:
    """Events, status and times of a simulation that has ended."""

    options: SimulationOptions
    title: str
    nodes: tuple[NodeRun, ...]
    began_at_s: float  # wall clock
    first_step_at_s: float  # wall clock; everything before is set-up
    ended_at_s: float
    was_stopped: bool = False  # by a signal, before its end


Watch = Callable[[str, Event], None]  # node name, event
Tick = Callable[[Mapping[str, str]], None]  # node name -> what it does now


async def run_swarm(options: SimulationOptions, directory: Path, watch: Watch, tick: Tick) -> SwarmRun:
    """Runs a swarm until every trainer that is left has made its steps, or the time is up.

    Args:
        options: options of the simulation.
        directory: folder for the state of all processes, without the state of an earlier run.
        watch: called with every event of every node as it appears, and of every disturbance.
        tick: called about every POLL_S with node name -> newest sign of life.

    Raises:
        ConfigError: a configuration cannot work.
        SimulationFailed: a process did not start, fell silent, died unasked, or does no useful work.
        Unavailable: the fork server failed.
    """
    configs = node_configs(options, directory)
    if PRESETS[options.preset].lists_members:
        configs = _listed(configs)
    modules = OF_AGENTS + (OF_WORKERS if any(config.worker == "inline" for config in configs) else ())
    began_s = time.time()
    waits = dict.fromkeys((config.name for config in configs), "waits for packages and the coordinator, which start")
    start = asyncio.create_task(_repeat(lambda: tick(waits)), name="signs of the start")
    try:
        async with fork_server(modules, directory / "imports.txt") as forks:
            coordinator = Process("coordinator", directory / "coordinator", forks)
            nodes = {config.name: Process(config.name, config.dir, forks) for config in configs}
            await _run(options, configs, coordinator, nodes, watch, tick, start)
    finally:
        start.cancel()
    return read_run(options, directory, began_s)


def _listed(configs: Sequence[NodeConfig]) -> list[NodeConfig]:
    """Adds a list of members to the configurations, unless one sets `entry`; first makes the key of every node."""
    for config in configs:
        make_private(config.dir)
    members = tuple(load_or_create_identity(config.dir / "identity.key").node_id for config in configs)
    entry = EntryConfig(kind="members", members=members)
    has_own_rule = any(config.entry != EntryConfig() for config in configs)
    return [config if has_own_rule else config.model_copy(update={"entry": entry}) for config in configs]


async def _run(
    options: SimulationOptions,
    configs: Sequence[NodeConfig],
    coordinator: Process,
    nodes: dict[str, Process],
    watch: Watch,
    tick: Tick,
    start: asyncio.Task[None],
) -> None:
    """Starts all processes, cancels `start`, watches them to the end, and stops those that still run."""
    try:
        info = await _start_coordinator(coordinator, configs[0])
        for config in configs:
            await _start_node(nodes[config.name], config, info)
        start.cancel()
        trainers = {config.name for config in configs if Role.TRAINER in config.roles}
        await _watch(coordinator, nodes, trainers, options, watch, tick)
        await asyncio.sleep(1.2)  # one more status.json of each node (written every second)
    finally:
        try:
            await asyncio.gather(*(process.stop() for process in nodes.values()))
        finally:  # also where a second signal gives the nodes no time to end by themselves
            await coordinator.stop()


async def _repeat(call: Callable[[], None]) -> None:
    while True:
        call()
        await asyncio.sleep(POLL_S)


def read_run(options: SimulationOptions, directory: Path, began_at_s: float) -> SwarmRun:
    """The result of a run from the events and status files that its processes left in its directory."""
    nodes = tuple(_read_node(config) for config in node_configs(options, directory))
    # across nodes: each file alone has only its own first step
    steps_at_s = [made.at_s for node in nodes for made in events_of(StepMade, node.events)]
    return SwarmRun(
        options=options,
        title=PRESETS[options.preset].title,
        nodes=nodes,
        began_at_s=began_at_s,
        first_step_at_s=min(steps_at_s, default=0.0),
        ended_at_s=time.time(),
    )


def _read_node(config: NodeConfig) -> NodeRun:
    process = Process(config.name, config.dir)
    events, status = process.read_events(), process.status()
    starts = events_of(NodeStarted, events)
    return NodeRun(
        name=config.name,
        node_id=starts[-1].node_id if starts else "",
        roles=config.roles,
        curriculum=tuple(config.generator.env_weights),
        events=tuple(events),
        status=status,
        num_starts=len(starts),
        episodes=read_episodes(config.dir),
    )


async def _start_coordinator(process: Process, node: NodeConfig) -> JsonDict:
    offered = await asyncio.to_thread(_config_to_offer, node)
    config = CoordinatorConfig(dir=process.directory, run_id=node.run_id, lease_s=10.0, node=offered)
    process.directory.mkdir(parents=True, exist_ok=True)
    path = process.directory / "coordinator.toml"
    await asyncio.to_thread(write_config, config, path)
    await process.start(["coordinator.cli", "start", "--config", str(path)])
    info = await _read_when_there(process.directory / "coordinator.json", process)
    # a restart must come back on the same port: pin what was picked
    pinned = config.model_copy(update={"listen": info["listen"], "http_listen": info["http_listen"]})
    await asyncio.to_thread(write_config, pinned, path)
    return info


async def _read_when_there(path: Path, process: Process) -> JsonDict:
    """JSON that a process writes at its start. Raises SimulationFailed if the process dies or falls silent before."""
    silence = SilenceWatch(time.monotonic)
    while not await asyncio.to_thread(path.exists):
        process.check()
        await asyncio.to_thread(silence.look, process)
        silence.check([process.name])
        await asyncio.sleep(POLL_S)
    return json.loads(await asyncio.to_thread(path.read_text))


def _config_to_offer(node: NodeConfig) -> NodeConfig:
    """Configuration for joining nodes: `node`, or its run and age bound if it needs code or data of this machine."""
    try:
        manifest_of(node, node.run_id, "", 0.0)
    except ConfigError:
        return NodeConfig(run_id=node.run_id, replay=ReplayConfig(max_age_steps=node.replay.max_age_steps))
    return node


async def _start_node(process: Process, config: NodeConfig, info: JsonDict) -> None:
    directory = config.directory.model_copy(update={"bootstrap": tuple(info["bootstrap_peers"])})
    link = config.coordinator.model_copy(update={"address": info["listen"], "fingerprint": info["fingerprint"]})
    config = config.model_copy(update={"directory": directory, "coordinator": link})
    process.directory.mkdir(parents=True, exist_ok=True)
    path = process.directory / NODE_FILE
    await asyncio.to_thread(write_config, config, path)
    await process.start(["node.cli", "start", "--config", str(path)])


async def _watch(
    coordinator: Process,
    nodes: dict[str, Process],
    trainers: set[str],
    options: SimulationOptions,
    watch: Watch,
    tick: Tick,
) -> None:
    """Reports events and applies due kills, stops and restarts, until every trainer has finished or the time is up.

    The user's time limit counts from the first group, with which set-up is over; kills and stops count from the first
    step.

    Raises:
        SimulationFailed: no step within that limit, none of a node's first MANY_UNSCORED groups could be scored, a
            worker died MANY_DEATHS times without a step, or a process fell silent or died unasked.
        Unavailable: the fork server failed.
    """
    limit_s = math.inf if options.minutes is None else 60 * options.minutes
    everyone = {**nodes, "coordinator": coordinator}
    actions = [ProcessFault(at_s=at_s, kind="kill", name=name) for name, at_s in options.kill]
    actions += [ProcessFault(at_s=at_s, kind="stop", name=name) for name, at_s in options.stop]
    running = set(trainers)
    first_groups = {name: Counter[str]() for name in nodes}  # made before the first step, scored or not
    deaths = Counter[str]()  # of a node's worker since its newest step
    first_group_s, first_step_s, looked_s = None, None, -math.inf
    silence, watched = SilenceWatch(time.monotonic), set(nodes)
    while running:
        for name, process in nodes.items():
            for event in await asyncio.to_thread(process.read_events):
                watch(name, event)
                if isinstance(event, GroupPut | GroupUnscored | StepMade) and first_group_s is None:
                    first_group_s = time.monotonic()
                if first_step_s is None:
                    _require_scores(name, event, first_groups[name])
                if isinstance(event, StepMade):
                    deaths[name] = 0
                    first_step_s = first_step_s or time.monotonic()
                if isinstance(event, WorkerDied):
                    deaths[name] += 1
                    _require_life(process, deaths[name])
                if isinstance(event, NodeFinished):
                    running.discard(name)
                    watched.discard(name)
            process.check()
        coordinator.check()
        if first_step_s is not None:
            elapsed_s = time.monotonic() - first_step_s
            for action in sorted((each for each in actions if each.at_s <= elapsed_s), key=lambda each: each.at_s):
                actions.remove(action)
                watch(action.name, await _carry_out(action, everyone[action.name]))
                if action.kind == "kill" and options.restart:
                    actions.append(ProcessFault(at_s=elapsed_s + RESTART_AFTER_S, kind="restart", name=action.name))
                elif action.kind != "restart":
                    running.discard(action.name)  # it cannot finish any more
                    watched.discard(action.name)
        if running and time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            for name in watched:
                await asyncio.to_thread(silence.look, nodes[name])
            silence.check(watched)
        if first_group_s is not None and time.monotonic() - first_group_s > limit_s:
            if first_step_s is None:
                limit = f"{limit_s:.0f} s after the first group"
                raise SimulationFailed(f"no step within {limit}{_why_no_step(nodes, trainers)}")
            return
        tick(silence.last_signs)
        await asyncio.sleep(POLL_S)


def _require_life(process: Process, num_deaths: int) -> None:
    """Raises SimulationFailed if a worker has died MANY_DEATHS times without a step."""
    if num_deaths >= MANY_DEATHS:
        raise SimulationFailed(f"{process.name}: its worker died {num_deaths} times without a step; end of its log:\n"
                               f"{process.log_tail()}")  # fmt: skip


def _require_scores(name: str, event: Event, groups: Counter[str]) -> None:
    """Counts an event; raises SimulationFailed with the reason if none of a node's first groups could be scored."""
    groups["scored"] += isinstance(event, GroupPut)
    if isinstance(event, GroupUnscored):
        groups["not scored"] += 1
        if groups["not scored"] >= MANY_UNSCORED and not groups["scored"]:
            raise SimulationFailed(f"{name}: none of its first {MANY_UNSCORED} groups could be scored: {event.error}")


def _why_no_step(nodes: dict[str, Process], trainers: set[str]) -> str:
    """A hint at the cause: the wait that each trainer's status shows, and the log files."""
    found = {name: waits_for(status) for name in sorted(trainers) if (status := nodes[name].status())}
    waiting = "".join(f"; {name} waits for {what}" for name, what in found.items() if what)
    return f"{waiting}; see the log.txt of each node"


async def _carry_out(action: ProcessFault, process: Process) -> Event:
    """Signals or starts the process; returns the event for the live view."""
    match action.kind:
        case "kill":
            process.send(signal.SIGKILL)
            return NodeKilled(at_s=time.time())
        case "stop":
            process.send(signal.SIGSTOP)
            return NodeStopped(at_s=time.time())
        case "restart":
            await process.start()
            return NodeRestarted(at_s=time.time())


def delete_heavy(directories: Iterable[Path]) -> int:
    """Deletes the HEAVY folders of nodes that have ended; returns the freed bytes. Events, logs and groups stay."""
    freed = 0
    for folder in [directory / name for directory in directories for name in HEAVY]:
        if folder.is_dir() and not folder.is_symlink():
            freed += sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
    return freed
