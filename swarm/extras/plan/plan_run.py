"""The figures of a finished run, and the answer of `swarm plan` as a table with its inequalities.

Invariant: an option replaces the figure that a run measured. A required figure that neither gives is an error that
names the option; bytes and seconds of transfers that neither gives count as 0.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from swarm.cli.plan import PlanOptions
from swarm.errors import ConfigError
from swarm.events import (
    Event,
    GroupPut,
    GroupsDrawn,
    Kind,
    StepMade,
    VersionApplied,
    VersionPublished,
    events_of,
    finite,
)
from swarm.extras.plan.capacity_plan import (
    GeneratorFigures,
    Inequality,
    LearnerFigures,
    Plan,
    figure,
    fleet,
    plan,
)

if TYPE_CHECKING:
    from swarm.config import NodeConfig

_EVENTS: Final = "events.jsonl"
_WINDOWS: Final = 5  # a generator's speed is that of its fastest fifth: in the others it may have waited for credit
_MIN_BATCHES: Final = 2  # in a fifth
_SAME_BATCH: Final = 0.25  # of the mean time between two groups: what comes sooner is of the same batch


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """Figures that were measured in a finished run; None for a figure that was not measured."""

    trainer: str
    generators: tuple[GeneratorFigures, ...]
    step_s: float | None = None
    groups_per_step: float | None = None
    tokens_per_group: float | None = None
    bytes_per_group: float | None = None
    patch_bytes: float | None = None
    encode_s: float | None = None
    max_age_steps: int | None = None
    computed_in: str = ""  # dtype of the trainer's passes, with the speeds that decided


def read_run(directory: Path, trainer: str = "") -> RunFigures:
    """Reads a run: a directory with `<node>/events.jsonl` and `<node>/node.toml`, or with those in its folder `swarm`.

    Args:
        directory: directory of the run.
        trainer: name of the node whose steps count; empty: the only node that made steps.

    Raises:
        ConfigError: there is no run, or the named node made no step, or no node is named and not exactly one made
            steps.
    """
    from node.status import computed_in
    from swarm.telemetry import read_events

    if not any(directory.glob(f"*/{_EVENTS}")):
        directory /= "swarm"
    nodes = {path.parent.name: read_events(path) for path in sorted(directory.glob(f"*/{_EVENTS}"))}
    if not nodes:
        raise ConfigError(f"--run {directory}: no <node>/{_EVENTS} in it; give the directory of a finished run")
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
                groups_per_batch=1 if (own := _config(directory / each)) is None else own.generator.groups_per_batch,
                apply_s=_mean(applied[each], lambda e: e.seconds.get("stage", 0.0) + e.seconds.get("load", 0.0)) or 0.0,
                pause_s=_mean(applied[each], lambda e: e.seconds.get("pause", 0.0)) or 0.0,
            )
            for each, events in producing.items()
            if (speed := _tokens_per_s(events)) is not None
        ),
        step_s=median(map(_step_s, steps)) if steps else None,
        groups_per_step=_mean(draws, lambda d: sum(each.is_own_policy for each in d.groups) + d.num_zero_variance),
        tokens_per_group=_mean(puts, lambda put: put.num_tokens),
        bytes_per_group=_mean(puts, lambda put: put.size_bytes),
        patch_bytes=_mean(patches, lambda patch: patch.num_bytes),
        encode_s=median(step.seconds.get("publish", 0.0) for step in steps) if steps else None,
        max_age_steps=None if config is None else config.replay.max_age_steps,
        computed_in=computed_in(directory / name),
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
    """Seconds of a step without the wait for its groups; `learn` has everything between draw and publishing."""
    seconds = step.seconds
    parts = ("score", "backward", "optimizer")
    learning = seconds["learn"] if "learn" in seconds else sum(seconds.get(part, 0.0) for part in parts)
    return learning + seconds.get("publish", 0.0)


def _tokens_per_s(puts: Sequence[GroupPut]) -> float | None:
    """Tokens per second of the fastest consecutive fifth of a node's batches; None with too few batches."""
    batches = _batches(puts)
    width = len(batches) // _WINDOWS
    if width < _MIN_BATCHES:
        return None
    rates: list[float] = []
    for first in range(len(batches) - width):
        made = batches[first + 1 : first + width + 1]
        rates.append(sum(tokens for _, tokens in made) / (made[-1][0] - batches[first][0]))
    return max(rates)


def _batches(puts: Sequence[GroupPut]) -> list[tuple[float, int]]:
    """(wall clock of the last group, tokens) of each batch; groups that follow closely are of one batch."""
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


def _config(directory: Path) -> "NodeConfig | None":
    from swarm.config import NODE_FILE, NodeConfig, load_config

    path = directory / NODE_FILE
    try:
        return load_config(NodeConfig, path) if path.is_file() else None
    except ConfigError:
        return None  # written by another release


# --- the command -----------------------------------------------------------------------------------


def run_plan(options: PlanOptions) -> bool:
    """Prints the plan; returns True if a kind of generators meets every condition, or a setting fits the GPU.

    Raises:
        ConfigError: a figure is missing or out of bounds (names the option), or the run or configuration cannot be
            read.
    """
    run = options.run
    if options.gpu is not None:
        return _plan_device(_positive("--gpu", options.gpu), options.config, options.as_json)
    measured = RunFigures(trainer="", generators=()) if run is None else read_run(run, options.trainer)

    def needed(option: str, given: float | None, of_run: float | None) -> float:
        return _positive(option, _needed(option, given, of_run, run))

    def other(option: str, given: float | None, of_run: float | None) -> float:
        return _not_negative(option, given if given is not None else of_run or 0.0)

    learner = LearnerFigures(
        step_s=needed("--step-s", options.step_s, measured.step_s),
        groups_per_step=needed("--groups-per-step", options.groups_per_step, measured.groups_per_step),
        tokens_per_group=needed("--tokens-per-group", options.tokens_per_group, measured.tokens_per_group),
        max_age_steps=int(
            _not_negative("--max-age", _needed("--max-age", options.max_age, measured.max_age_steps, run))
        ),
        bytes_per_group=other("--bytes-per-group", options.bytes_per_group, measured.bytes_per_group),
        patch_bytes=other("--patch-bytes", options.patch_bytes, measured.patch_bytes),
        encode_s=other("--encode-s", options.encode_s, measured.encode_s),
    )
    kinds = [_changed(kind, options) for kind in _kinds(measured.generators, options.tokens_per_s, run)]
    plans = [plan(learner, kind) for kind in kinds]
    together = fleet(learner, kinds) if run is not None and not options.tokens_per_s else None
    if options.as_json:
        shown = [{**asdict(each), "holds": each.holds} for each in plans]
        supply = None if together is None else asdict(together)
        typer.echo(json.dumps(finite({"learner": asdict(learner), "plans": shown, "together": supply}), indent=2))
    else:
        console = Console()
        if measured.computed_in and options.step_s is None:
            console.print(f"{measured.trainer} computed in {measured.computed_in}", markup=False, soft_wrap=True)
        _print(console, learner, plans, together)
    return any(each.holds for each in plans)


def _plan_device(gpu_gib: float, path: Path | None, as_json: bool) -> bool:
    """Prints the settings of a node and their memory on a GPU; returns True if one of them fits."""
    from swarm.config import NodeConfig, load_config
    from swarm.extras.plan.device_plan import GIB, device_plans, print_device_plans

    config = load_config(NodeConfig, path)
    if not as_json:
        return print_device_plans(Console(), config, gpu_gib, path)
    plans = device_plans(config, int(gpu_gib * GIB))
    typer.echo(json.dumps([asdict(plan) for plan in plans], indent=2))
    return any(plan.fits for plan in plans)


def _changed(kind: GeneratorFigures, options: PlanOptions) -> GeneratorFigures:
    """The generator with the figures that the options give in place of measured ones."""
    changed = {
        "groups_per_batch": ("--groups-per-batch", options.groups_per_batch, _positive),
        "apply_s": ("--apply-s", options.apply_s, _not_negative),
        "pause_s": ("--pause-s", options.pause_s, _not_negative),
        "down_bytes_per_s": ("--down", options.down, _positive),
        "up_bytes_per_s": ("--up", options.up, _positive),
    }
    given: dict[str, Any] = {
        name: check(option, value) for name, (option, value, check) in changed.items() if value is not None
    }
    return replace(kind, **given)


def _kinds(
    measured: tuple[GeneratorFigures, ...], tokens_per_s: Sequence[float], run: Path | None
) -> list[GeneratorFigures]:
    """Generators of the run, or for each given speed one that is otherwise like the first of the run.

    Raises:
        ConfigError: no speed is given, and the run measured none; or a speed is not positive.
    """
    speeds = [_positive("--tokens-per-s", speed) for speed in tokens_per_s]
    if speeds:
        like = measured[0] if measured else GeneratorFigures(name="", tokens_per_s=0.0)
        return [replace(like, name=f"{figure(speed)} tokens/s", tokens_per_s=speed) for speed in speeds]
    if not measured:
        _needed("--tokens-per-s", None, None, run)
    return list(measured)


def _needed(option: str, given: float | None, measured: float | None, run: Path | None) -> float:
    value = given if given is not None else measured
    if value is None:
        where = "give it, or a run that measured it with --run" if run is None else f"{run} did not measure it; give it"
        raise ConfigError(f"{option}: missing; {where}")
    return value


def _positive(option: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{option}: {value:g} must be above 0")
    return value


def _not_negative(option: str, value: float) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{option}: {value:g} must be 0 or more")
    return value


def _print(console: Console, learner: LearnerFigures, plans: list[Plan], together: Inequality | None) -> None:
    console.print(
        f"A step takes T = {figure(learner.step_s)} s and uses up b = {figure(learner.groups_per_step)} groups of "
        f"{figure(learner.tokens_per_group)} tokens: {figure(learner.demand)} groups/s, "
        f"{figure(learner.demand * learner.tokens_per_group)} tokens/s. Lag bound: {learner.max_age_steps} steps.",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    for name in ("generator", "groups/s", "needed", "worst lag", "mean lag", "least tokens/s", "least bytes/s"):
        table.add_column(name, justify="left" if name == "generator" else "right")
    for each in plans:
        table.add_row(
            each.generator.name,
            figure(each.groups_per_s),
            "never" if each.num_generators is None else str(each.num_generators),
            _or(each.lag_steps, "never"),
            _or(each.lag_mean_steps, "never"),
            _or(each.least_tokens_per_s, "none"),
            _or(each.least_down_bytes_per_s, "none"),
        )
    console.print(table)
    console.print(
        "Lag: of a swarm in balance, and so the smallest bound to configure. Supply beyond demand waits until ages are "
        "at the bound, never beyond: for younger data lower --max-age and replay.max_age_steps to it.",
        soft_wrap=True,
    )
    for each in plans:
        console.print(f"\n{each.generator.name}:", soft_wrap=True)
        for inequality in each.inequalities:
            _print_inequality(console, inequality)
    if together is not None:
        console.print()
        _print_inequality(console, together)


def _print_inequality(console: Console, inequality: Inequality) -> None:
    mark = "[green]holds[/green]" if inequality.holds else "[red]fails[/red]"
    console.print(f"  {mark}  {inequality.name}: {inequality.formula}", soft_wrap=True)
    console.print(f"         {inequality.numbers}", soft_wrap=True, highlight=False)


def _or(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else figure(value)
