"""What a finished run measured of its learner and its generators: the figures that a plan starts from.

Invariant: every figure is read from events and configurations that the nodes of the run wrote; what was not measured is
None, never a guess.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

from swarm.cli.plan import GeneratorFigures
from swarm.config import NodeConfig, load_config
from swarm.errors import ConfigError
from swarm.events import Event, GroupPut, GroupsDrawn, Kind, StepMade, VersionApplied, VersionPublished, events_of
from swarm.telemetry import read_events

EVENTS: Final = "events.jsonl"
CONFIG: Final = "node.toml"
SWARM: Final = "swarm"  # where `swarm simulate` puts its nodes, beside their rival
_WINDOWS: Final = 5  # a generator's speed is that of its fastest fifth: in the others it may have waited for leave
_LEAST_BATCHES: Final = 2  # in a fifth
_SAME_BATCH: Final = 0.25  # of the mean time between two groups: what comes sooner is of the same batch


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What a run says; None where it says nothing."""

    trainer: str
    generators: tuple[GeneratorFigures, ...]
    step_s: float | None = None
    groups_per_step: float | None = None
    tokens_per_group: float | None = None
    bytes_per_group: float | None = None
    patch_bytes: float | None = None
    encode_s: float | None = None
    max_age_steps: int | None = None


def read_run(directory: Path, trainer: str = "") -> RunFigures:
    """Reads the directory that `swarm simulate` wrote, or any with one directory for each node.

    Args:
        directory: has `<node>/events.jsonl` and `<node>/node.toml`, or a folder `swarm` with them.
        trainer: name of the node whose steps count; empty: the only one that made any.

    Raises:
        ConfigError: there is no run, or no such trainer, or several.
    """
    if not any(directory.glob(f"*/{EVENTS}")):
        directory /= SWARM
    nodes = {path.parent.name: read_events(path) for path in sorted(directory.glob(f"*/{EVENTS}"))}
    if not nodes:
        raise ConfigError(f"--run {directory}: no <node>/{EVENTS} in it; give the directory of a finished run")
    name = _trainer(directory, nodes, trainer)
    producing = {each: puts for each, events in nodes.items() if (puts := events_of(GroupPut, events))}
    steps, draws = events_of(StepMade, nodes[name]), events_of(GroupsDrawn, nodes[name])
    policy = next((version.policy_id for version in events_of(VersionPublished, nodes[name])), "")
    puts = [put for made in producing.values() for put in made if put.policy_id == policy]
    applied = {each: events_of(VersionApplied, events)[1:] for each, events in nodes.items()}  # the first is no patch
    patches = [event for events in applied.values() for event in events]
    config = _config(directory / name)
    return RunFigures(
        trainer=name,
        generators=tuple(
            GeneratorFigures(
                name=each,
                tokens_per_s=speed,
                groups_per_batch=_groups_per_batch(directory / each),
                apply_s=_mean(applied[each], lambda e: e.seconds.get("stage", 0.0) + e.seconds.get("load", 0.0)) or 0.0,
                pause_s=_mean(applied[each], lambda e: e.seconds.get("pause", 0.0)) or 0.0,
            )
            for each, events in producing.items()
            if (speed := _tokens_per_s(events)) is not None
        ),
        step_s=median(map(_step_s, steps)) if steps else None,
        groups_per_step=_mean(draws, _groups_used),
        tokens_per_group=_mean(puts, lambda put: put.num_tokens),
        bytes_per_group=_mean(puts, lambda put: put.size_bytes),
        patch_bytes=_mean(patches, lambda patch: patch.num_bytes),
        encode_s=median(step.seconds.get("publish", 0.0) for step in steps) if steps else None,
        max_age_steps=None if config is None else config.replay.max_age_steps,
    )


def _trainer(directory: Path, nodes: dict[str, list[Event]], wanted: str) -> str:
    trainers = [name for name, events in nodes.items() if events_of(StepMade, events)]
    known = ", ".join(trainers) or "none"
    if wanted:
        if wanted not in trainers:
            raise ConfigError(f"--trainer {wanted}: made no step in {directory}; those that did: {known}")
        return wanted
    if len(trainers) != 1:
        raise ConfigError(f"--run {directory}: {len(trainers)} nodes made steps ({known}); name one with --trainer")
    return trainers[0]


def _mean(events: Sequence[Kind], value: Callable[[Kind], float]) -> float | None:
    return fmean(map(value, events)) if events else None


def _step_s(step: StepMade) -> float:
    """A step without the wait for its groups; `learn` has everything between draw and publishing."""
    seconds = step.seconds
    parts = ("score", "backward", "optimizer")
    learning = seconds["learn"] if "learn" in seconds else sum(seconds.get(part, 0.0) for part in parts)
    return learning + seconds.get("publish", 0.0)


def _groups_used(draw: GroupsDrawn) -> int:
    return sum(group.is_own_policy for group in draw.groups) + draw.num_zero_variance


def _tokens_per_s(puts: Sequence[GroupPut]) -> float | None:
    """Of the fastest fifth of a node's batches; None with too few of them to tell."""
    batches = _batches(puts)
    width = len(batches) // _WINDOWS
    if width < _LEAST_BATCHES:
        return None
    rates: list[float] = []
    for first in range(len(batches) - width):
        made = batches[first + 1 : first + width + 1]
        rates.append(sum(tokens for _, tokens in made) / (made[-1][0] - batches[first][0]))
    return max(rates)


def _batches(puts: Sequence[GroupPut]) -> list[tuple[float, int]]:
    """(when it was handed over, tokens) of each batch: its groups are handed over one right after the other."""
    if len(puts) < 2:
        return []
    gap_s = _SAME_BATCH * (puts[-1].at_s - puts[0].at_s) / (len(puts) - 1)
    batches: list[tuple[float, int]] = []
    for put in puts:
        tokens = put.num_tokens
        if batches and put.at_s - batches[-1][0] <= gap_s:
            tokens += batches.pop()[1]
        batches.append((put.at_s, tokens))
    return batches


def _config(directory: Path) -> NodeConfig | None:
    path = directory / CONFIG
    try:
        return load_config(NodeConfig, path) if path.is_file() else None
    except ConfigError:
        return None  # written by another release


def _groups_per_batch(directory: Path) -> int:
    config = _config(directory)
    return 1 if config is None else config.generator.groups_per_batch
