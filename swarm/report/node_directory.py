"""Reader of the directories of nodes, running or not: their result for a report.

Invariant: only reads, one event at a time; a part that is missing is left out of the report.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from node.status import node_name, problems, read_status
from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.diagnosis.read_snapshot import flat
from swarm.errors import ConfigError, SwarmError
from swarm.events import EarlierRefusals
from swarm.identity import Identity
from swarm.printable import one_line
from swarm.process import is_running
from swarm.report.invariants import PROGRESS, Invariants
from swarm.report.result import NodeResult, RunResult, SwarmResult
from swarm.report.tally import NodeTally
from swarm.telemetry import EventTail
from swarm.telemetry.shown_episodes import read_episodes
from swarm.trained.samples import STORE, SampledGroup, SampleReader
from swarm.types import JsonDict, NodeId, Role, short

EVENTS: Final = "events.jsonl"
MAX_CHANGES: Final = 40
NOT_OF_THE_TRAINING: Final = {
    "dir",
    "name",
    "run_id",
    "environments",
    "directory",
    "coordinator",
    "exchange",
    "entry",
    "serve",
}
MAX_IDLE_S: Final = 300.0  # as `swarm status` has it


@dataclass(frozen=True, kw_only=True)
class NodeDirectory:
    """Contents of a node's directory, without the events."""

    path: Path
    name: str
    node_id: NodeId  # empty where nothing says it
    config: NodeConfig | None  # None: there is no node.toml that can be read
    status: JsonDict  # {}: there is none
    is_running: bool

    @property
    def events(self) -> EventTail:
        """A reader of the event log, from its beginning."""
        return EventTail(self.path / EVENTS)

    @property
    def is_whole(self) -> bool:
        """True if no file of the event log is gone."""
        return not isinstance(next(self.events.stream(), None), EarlierRefusals)

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the node makes no progress, as in `swarm status`; none without a status."""
        if not self.status:
            return ()
        return tuple(problems(self.status, time.time(), MAX_IDLE_S, self.is_running, self.path))


def open_directory(path: Path) -> NodeDirectory:
    """Reads configuration, status and key of a node's directory; leaves out those that cannot be read.

    Raises:
        ConfigError: there is no event log, so it is no node's directory.
    """
    if not (path / EVENTS).is_file():
        raise ConfigError(
            f"{path}: no {EVENTS}, so no directory of a node that was started; `swarm join` and `swarm train` name "
            "theirs with --dir, `swarm simulate` keeps them in <run>/swarm/<name>"
        )
    config, status, node_id = None, JsonDict(), ""
    with suppress(SwarmError):
        config = load_config(NodeConfig, path / NODE_FILE)
    with suppress(SwarmError):
        status = read_status(path)
    with suppress(SwarmError, OSError):
        node_id = Identity.load(path / "identity.key").node_id
    node_id = node_id or str(status.get("node_id", ""))
    name = (config.name if config else "") or node_name(path, status)
    return NodeDirectory(
        path=path,
        name=one_line(name)[:60],
        node_id=node_id,
        config=config,
        status=status,
        is_running=is_running(path),
    )


def open_directories(paths: Sequence[Path]) -> list[NodeDirectory]:
    """Reads several directories; nodes of the same name get their path as part of the name.

    Raises:
        ConfigError: as `open_directory`, or for a directory that is named twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"{', '.join(map(str, paths))}: the same directory is named twice; name each once")
    found = [open_directory(path) for path in paths]
    names = [each.name for each in found]
    return [replace(each, name=f"{each.name} ({each.path})") if names.count(each.name) > 1 else each for each in found]


class NodeReports:
    """Reports of one node, or of several side by side, again and again; each `read` parses only new events.

    Example:
        result = NodeReports([Path("swarm-train")]).read(num_samples=6)
    """

    def __init__(self, paths: Sequence[Path], is_trusted: bool = False) -> None:
        """Opens the directories; if there are several, reads which groups they made. Raises as `open_directories`.

        Args:
            paths: directories of nodes.
            is_trusted: True: for samples, code that they name is loaded, whoever made them.
        """
        self._paths, self._is_trusted = paths, is_trusted
        self.directories = open_directories(paths)
        self._tails = [EventTail(path / EVENTS) for path in paths]
        self._tallies = [NodeTally() for _ in paths]
        self._over: set[tuple[Path, str]] = set()
        # of a node that runs, another one may have learned from a group that was made after its log was read
        known = [each for each in self.directories if each.is_whole and (len(paths) == 1 or not each.is_running)]
        self._invariants = Invariants(known=frozenset(each.node_id for each in known))
        if len(paths) > 1:  # before all others the groups made here, so that it is known whose groups exist
            for each in self.directories:
                for event in each.events.stream(lambda line: line.startswith(b'{"kind":"put"')):
                    self._invariants.check(each.node_id, event)

    def read(self, num_samples: int = 0) -> RunResult:
        """Returns the report of the directories as they are now (blocking; at first 6 s for 100,000 events).

        Args:
            num_samples: number of newest groups of each node that the report shows.

        Raises:
            ConfigError: a directory or its event log is gone.
        """
        self.directories = open_directories(self._paths)
        nodes = [
            self._node(each, tail, tally)
            for each, tail, tally in zip(self.directories, self._tails, self._tallies, strict=True)
        ]
        self._invariants.finish({})
        steps_at_s = [row.at_s for node in nodes for row in node.steps[:1]]
        configs = [each.config for each in self.directories if each.config is not None]
        return RunResult(
            title=_title(self.directories),
            swarm=SwarmResult(
                nodes=tuple(
                    _with_directory(node, each, *_samples(each, num_samples, self._is_trusted))
                    for node, each in zip(nodes, self.directories, strict=True)
                ),
                began_at_s=min((node.began_at_s for node in nodes if node.began_at_s), default=0.0),
                first_step_at_s=min(steps_at_s, default=0.0),
                ended_at_s=max((node.ended_at_s for node in nodes), default=0.0),
            ),
            # a node may have just begun: no progress is not yet a fault
            invariants=tuple(each for each in self._invariants.verdicts() if each.name != PROGRESS),
            options=_options(self.directories),
            num_tries=configs[0].evaluation.num_tries if configs else 0,
        )

    def _node(self, directory: NodeDirectory, tail: EventTail, tally: NodeTally) -> NodeResult:
        for event in tail.stream():
            tally.add(event)
            self._invariants.check(directory.node_id or tally.node_id, event)
        config = directory.config
        if config is not None:
            for what, limit in (("groups", config.replay.max_groups), ("bytes", config.replay.max_bytes)):
                fill = directory.status.get(f"replay_{what}", 0)
                if fill > limit and (directory.path, what) not in self._over:  # once, however often it is read
                    self._over.add((directory.path, what))
                    self._invariants.bound(directory.node_id, f"replay {what}", fill, limit)
        return tally.result(
            directory.name,
            directory.node_id,
            tuple(config.generator.env_weights) if config else (),
            directory.status,
            trains=config is None or Role.TRAINER in config.roles,
            episodes=read_episodes(directory.path),
        )


def _with_directory(
    node: NodeResult, directory: NodeDirectory, samples: tuple[SampledGroup, ...], remark: str
) -> NodeResult:
    return replace(
        node, state=_state(node, directory), problems=directory.problems, samples=samples, samples_remark=remark
    )


def _samples(directory: NodeDirectory, limit: int, is_trusted: bool) -> tuple[tuple[SampledGroup, ...], str]:
    """Up to `limit` newest groups, up to half of them of other nodes, and a remark if they cannot be read."""
    if not limit or not (directory.path / STORE).is_file():
        return (), ""
    try:
        reader = SampleReader(directory.path, is_trusted)
        others = reader.newest(limit // 2, "others") if limit > 1 else []
        own = reader.newest(limit - len(others), "own")
    except SwarmError as error:
        return (), f"no samples: {error}"
    return (*own, *others), ""


def _state(node: NodeResult, directory: NodeDirectory) -> str:
    step = node.steps[-1].step if node.steps else int(directory.status.get("step", 0))
    state = "runs" if directory.is_running else "does not run"
    if directory.status.get("is_finished"):
        state += ", every step is made"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(node.ended_at_s)) if node.ended_at_s else "never"
    return f"{state}; step {step}; newest event {at}; id {short(node.node_id) or 'unknown'}"


def _title(directories: Sequence[NodeDirectory]) -> str:
    runs = list(dict.fromkeys(each.config.run_id for each in directories if each.config and each.config.run_id))
    return f"{', '.join(runs)}: {', '.join(each.name for each in directories)}" if runs else directories[0].name


def _options(directories: Sequence[NodeDirectory]) -> dict[str, Any]:
    """Configuration of the nodes by key; if the values of a key differ, the value of each node."""
    rows: dict[str, dict[str, str]] = {}
    for each in directories:
        for key, value in _settings(each).items():
            rows.setdefault(key, {})[each.name] = value
    return {
        key: next(iter(values.values()))
        if len(set(values.values())) == 1
        else "; ".join(f"{name}: {value}" for name, value in values.items())
        for key, values in rows.items()
    }


def _settings(directory: NodeDirectory) -> dict[str, str]:
    config = directory.config
    if config is None:
        return {}
    return {
        "model": config.model.source,
        "seed": str(config.seed),
        "recipe": config.learner.recipe,
        "learning rate": f"{config.learner.learning_rate:g}",
        "steps": str(config.learner.num_steps or "until it is stopped"),
        "groups of a step, own and others'": f"{config.replay.local_groups} and {config.replay.external_groups}",
        "max_age_steps": str(config.replay.max_age_steps),
        "max_new_tokens": str(config.generator.max_new_tokens),
        "environments": ", ".join(each.name for each in config.environments),
        "other than the defaults": _changes(config),
        "directory": str(directory.path),
    }


def _changes(config: NodeConfig) -> str:
    """Keys of the configuration whose values are not the defaults, with these values, as in `--set`."""
    now, usual = (flat(each.model_dump(mode="json", exclude=NOT_OF_THE_TRAINING)) for each in (config, NodeConfig()))
    changed = [f"{key}={one_line(str(value))[:80]}" for key, value in now.items() if value != usual.get(key)]
    return ", ".join(changed[:MAX_CHANGES]) + (
        f", {len(changed) - MAX_CHANGES} more" if len(changed) > MAX_CHANGES else ""
    )
