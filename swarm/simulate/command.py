"""`swarm simulate`: runs simulations, judges them and reports them.

Invariant: the exit code follows from the invariants alone; a run that learned badly but kept its promises is a result,
not a failure.
"""

import asyncio
import json
import re
import signal
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from node.device_checks import PROMPT_TOKENS, has_card, machine_choice, with_choice
from node.run_estimate import estimate_memory, lengths_of, read_shape
from swarm.config import EngineConfig, NodeConfig
from swarm.config.byte_sizes import byte_words
from swarm.errors import ConfigError
from swarm.events import GroupPut, NodeRestored, StepMade, events_of, finite
from swarm.model.compute_choice import ComputeChoice
from swarm.process import available_bytes, num_usable_cores
from swarm.report.html import write_report
from swarm.report.invariants import Invariants
from swarm.report.live import SHORTER, LiveProgress
from swarm.report.recipe_table import recipe_rows, recipe_table, write_recipes
from swarm.report.result import RunResult, SwarmResult
from swarm.report.tally import node_result
from swarm.report.terminal import render_summary
from swarm.simulate.local.run import NodeRun, SwarmRun, delete_heavy, read_run, run_swarm
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs, preset_of
from swarm.telemetry.time_left import LONG_S, TimeLeft, duration_words
from swarm.types import Role

AGENT_FORK_BYTES: Final = 200 * 2**20  # of a node that is a fork: eight tiny ones took 1.9 GiB in all
MIN_REPORTED_BYTES = 10**8  # deleted
_MEASURED_CORES: Final = 2  # `Preset.work_gflop`
KNOWN_FIRST = (GroupPut, NodeRestored)  # groups that exist; checked before their uses


def run_command(options: SimulationOptions, directory: Path, rival: str, console: Console) -> bool:
    """Runs a simulation and, if asked for, a second one to compare with; writes the report and prints the summary.

    Args:
        options: options of the simulation.
        directory: state and report; made if missing. The folder of each run must be empty.
        rival: second run, at equal rounds: silo or colocated, as the preset allows; "": none.
        console: shows progress and summary.

    Returns:
        True if every invariant held in every run that was reported.

    Raises:
        ConfigError: an option, the configuration or the directory cannot work; nothing was started.
        SimulationFailed: a process did not start, fell silent or died unasked.
        Unavailable: the fork server failed.
        KeyboardInterrupt: a signal ended the run early; a run that made a step is reported.
    """
    plans = {"swarm": options} | ({rival: _rival_of(options, rival)} if rival else {})
    runs = _run_all(plans, directory, console)
    measured = [run for run in runs if run.first_step_at_s or not run.was_stopped]
    holds = bool(measured) and _report(measured, rival, directory, console)
    _end_if_stopped(runs, directory, console)
    return holds


def compare_recipes(
    options: SimulationOptions, recipes: Sequence[str], num_seeds: int, directory: Path, console: Console
) -> bool:
    """Runs the same simulation with each recipe and seed, and reports all of them in one table.

    Args:
        options: options of the first recipe and seed.
        recipes: further recipes.
        num_seeds: runs of each recipe, with the seeds from that of the options on.
        directory: state and reports; made if missing.
        console: shows progress and table.

    Returns:
        True if every invariant held in every run.

    Raises: as `run_command`.
    """
    first = node_configs(options, directory)[0].learner.recipe
    named = {name: replace(options, recipe=name if name != first else options.recipe) for name in (first, *recipes)}
    if len(named) <= len(recipes):
        raise ConfigError(f"--compare {', '.join(recipes)}: a recipe is named twice, or is that of the run, {first}")
    seeds = range(options.seed, options.seed + num_seeds)
    plans = {
        f"{number}-{re.sub('[^A-Za-z0-9_.]', '_', Path(name).name)}-seed{seed}": (name, replace(plan, seed=seed))
        for number, (name, plan) in enumerate(named.items())
        for seed in seeds
    }
    runs = _run_all({folder: plan for folder, (_, plan) in plans.items()}, directory, console)
    results: dict[str, dict[int, SwarmResult]] = {name: {} for name in named}
    holds, links = len(runs) == len(plans), dict[str, str]()
    for (folder, (name, plan)), run in zip(plans.items(), runs, strict=False):
        result = _result([run], "", directory)
        write_report(replace(result, title=f"{run.title}: {name}, seed {plan.seed}"), directory / folder)
        for verdict in result.invariants:
            if not verdict.holds:
                console.print(f"violated in {folder}: {verdict.name} ({verdict.detail})", markup=False, soft_wrap=True)
        holds = holds and result.holds
        results[name][plan.seed] = result.swarm
        links[f"{name}, seed {plan.seed}"] = f"{folder}/report.html"
    rows = recipe_rows(results)
    title = f"{PRESETS[options.preset].title}: {len(named)} recipes"
    write_recipes(rows, title, links, directory / "report.html")
    (directory / "report.json").write_text(
        json.dumps(finite([asdict(row) for row in rows]), indent=1), encoding="utf-8"
    )
    console.print(recipe_table(rows))
    console.print(f"report: {directory / 'report.html'}", soft_wrap=True)
    _end_if_stopped(runs, directory, console)
    return holds


def _run_all(plans: Mapping[str, SimulationOptions], directory: Path, console: Console) -> list[SwarmRun]:
    """Checks all plans, then runs them one after the other, each in its folder; a signal ends all of it early."""
    _check(plans.values())
    _claim(directory, plans)
    options = next(iter(plans.values()))
    prepare_model(options, directory, console)
    configs = node_configs(options, directory)
    with console.status("measuring this machine"):
        choices = {each.compute_dtype: machine_choice(each) for each in {c.compute_dtype: c for c in configs}.values()}
    for setting, choice in choices.items():
        names = ", ".join(config.name for config in configs if config.compute_dtype == setting)
        if choice is not None:
            who = f"{names} compute" if len(choices) > 1 else "computes"
            console.print(f"{who} in {choice.words}", markup=False, highlight=False, soft_wrap=True)
    for line in forecast_lines(options, choices.values(), len(configs), num_usable_cores(), len(plans)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    decided = [with_choice(config, choices[config.compute_dtype]) for config in configs]
    for line in memory_lines(decided, available_bytes()):
        console.print(line, markup=False, soft_wrap=True)
    has_vllm = _has_vllm(options, console)
    runs: list[SwarmRun] = []
    for name, plan in plans.items():
        runs.append(_run(replace(plan, has_vllm=has_vllm), directory / name, console))
        if runs[-1].was_stopped:
            break
    return runs


def _end_if_stopped(runs: Sequence[SwarmRun], directory: Path, console: Console) -> None:
    """Raises KeyboardInterrupt if a signal ended the last run."""
    if runs[-1].was_stopped:
        ended = "the coordinator and every node have ended"
        console.print(f"stopped by a signal: {ended}; what they wrote is in {directory}", soft_wrap=True)
        raise KeyboardInterrupt


def _check(plans: Iterable[SimulationOptions]) -> None:
    """Raises ConfigError if a node would refuse its configuration or recipes."""
    from swarm.objectives.methods import recipes_of

    for plan in plans:
        for config in node_configs(plan, Path()):
            recipes_of(config)


def _claim(directory: Path, names: Iterable[str]) -> None:
    """Makes the folder of each run. Raises ConfigError if one is not empty or cannot be made."""
    folders = [directory / name for name in names]
    try:
        for folder in folders:
            if folder.is_dir() and any(folder.iterdir()):
                raise ConfigError(f"--out {directory}: {folder.name}/ is not empty; name another directory")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory}: cannot be made: {error.strerror}") from None


def _report(runs: Sequence[SwarmRun], rival: str, directory: Path, console: Console) -> bool:
    """Writes and prints the result of the runs; returns True if every invariant held."""
    result = _result(runs, rival, directory)
    write_report(result, directory)
    console.print(render_summary(result))
    console.print(f"report: {directory / 'report.html'}", soft_wrap=True)
    return result.holds


def _result(runs: Sequence[SwarmRun], rival: str, directory: Path) -> RunResult:
    config = node_configs(runs[0].options, directory)[0]
    return RunResult(
        title=runs[0].title,
        swarm=swarm_result(runs[0]),
        invariants=tuple(judge(runs).verdicts()),
        rival=swarm_result(runs[1]) if len(runs) > 1 else None,
        rival_kind=rival or "silo",
        options={"seed": runs[0].options.seed, **_describe(runs[0].options), "recipe": config.learner.recipe},
        num_tries=config.evaluation.num_tries,
    )


def _rival_of(options: SimulationOptions, rival: str) -> SimulationOptions:
    """The options of the second run. Raises ConfigError for an unknown preset, or a rival that does not fit."""
    is_echo = bool(preset_of(options).generators)
    fitting = "colocated" if is_echo else "silo"
    if rival != fitting:
        raise ConfigError(f"--compare {rival}: with --preset {options.preset} only {fitting} can be compared")
    return replace(options, colocated=True) if is_echo else silo_of(options)


def silo_of(options: SimulationOptions) -> SimulationOptions:
    """The options of the same run without sharing: as many groups per step, all of them own."""
    preset = PRESETS[options.preset]
    local, external = options.mix or (preset.local_groups, preset.external_groups)
    return replace(options, mix=(local + external, 0))


def prepare_model(options: SimulationOptions, directory: Path, console: Console) -> None:
    """Converts and caches the model once, before several nodes would do so at the same time. Raises ConfigError."""
    from swarm.config.generation_config import SHIPPED
    from swarm.model.source import resolve_source
    from swarm.model.tokenizer import load_tokenizer

    config = node_configs(options, directory)[0].model
    with console.status(f"preparing model {config.source}"):
        load_tokenizer(config)
        if config.source not in SHIPPED:
            resolve_source(config, None, with_weights=True)


def forecast_lines(
    options: SimulationOptions,
    choices: Iterable[ComputeChoice | None],
    num_nodes: int,
    num_cores: int,
    num_runs: int = 1,
) -> list[str]:
    """A line with the expected time if this machine takes long at its measured speed; none if the minutes are limited.

    Args:
        options: options of the run.
        choices: compute dtypes of the nodes with measured speeds; the slowest counts.
        num_nodes: nodes that run at the same time.
        num_cores: cores that the nodes share.
        num_runs: runs, one after the other.
    """
    preset = preset_of(options)
    speeds = [each.float32_gflops if each.dtype == "float32" else each.bfloat16_gflops for each in choices if each]
    if not speeds or not min(speeds) or options.minutes:
        return []
    rounds = preset.num_rounds if options.rounds is None else options.rounds
    crowding = max(1.0, num_nodes / num_cores) / max(1.0, preset.num_nodes / _MEASURED_CORES)
    left_s = num_runs * crowding * preset.work_gflop / min(speeds) * rounds / preset.num_rounds
    return [f"takes about {duration_words(left_s)} here, by that speed: {SHORTER}"] if left_s > LONG_S else []


def memory_lines(configs: Sequence[NodeConfig], available: int) -> list[str]:
    """A line if the nodes need more memory than there is (blocking); none for an unknown shape or where there is a GPU.

    Args:
        configs: configurations of the nodes, which are forks of one process.
        available: available memory, bytes.
    """
    shape = read_shape(configs[0].model)
    if shape is None or has_card():
        return []
    needed = 0
    for config in configs:
        lengths = lengths_of(config, PROMPT_TOKENS, config.may_have_turns)
        memory = estimate_memory(config, shape, lengths)
        needed += AGENT_FORK_BYTES + memory.peak - (memory.process if config.worker == "inline" else 0)
    if needed <= available:
        return []
    return [
        f"memory: {len(configs)} nodes need about {byte_words(needed)}, {byte_words(available)} are available: the "
        "system may end them; --nodes or --preset tiny takes less, and so does --set learner.token_budget=1024"
    ]


def _has_vllm(options: SimulationOptions, console: Console) -> bool:
    """True if vLLM is installed; if not, and a generator of the preset wants vLLM, prints a line."""
    from swarm.generation.vllm_process import has_vllm

    is_installed = has_vllm(EngineConfig())
    if "vllm" in PRESETS[options.preset].generators and not is_installed:
        console.print("vLLM is not installed here, transformers takes its place (make vllm installs it)")
    return is_installed


def _run(options: SimulationOptions, directory: Path, console: Console) -> SwarmRun:
    configs = node_configs(options, directory)
    curricula = {config.name: tuple(config.generator.env_weights) for config in configs}
    is_silo = configs[0].replay.external_groups == 0 and not PRESETS[options.preset].generators
    remark = " (silo: no sharing)" if is_silo else " (colocated: one node does both)" if options.colocated else ""
    title = PRESETS[options.preset].title + remark
    began_at_s = time.time()
    times = {config.name: TimeLeft(config=config) for config in configs if Role.TRAINER in config.roles}
    with LiveProgress(console, title, curricula, configs[0].learner.num_steps, times=times) as live:
        run = asyncio.run(_unless_stopped(run_swarm(options, directory, live.watch, live.tick), console))
    if run is None:
        run = replace(read_run(options, directory, began_at_s), was_stopped=True)
    if not options.keep_checkpoints:
        freed = delete_heavy(config.dir for config in configs)
        if freed >= MIN_REPORTED_BYTES:
            console.print(f"{freed / 1e9:.1f} GB of checkpoints deleted (--keep-checkpoints keeps them)")
    return run


async def _unless_stopped(work: Coroutine[Any, Any, SwarmRun], console: Console) -> SwarmRun | None:
    """Awaits a run and returns its result; None if Ctrl-C, SIGTERM or a closed terminal cancelled the run."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop() -> None:
        console.print("stopping: every process ends what is under way; a second Ctrl-C does not wait for that")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop)
    try:
        return await work
    except asyncio.CancelledError:
        return None


def swarm_result(run: SwarmRun) -> SwarmResult:
    """The run in the form that the report reads."""
    return SwarmResult(
        nodes=tuple(
            node_result(
                node.name,
                node.node_id,
                node.curriculum,
                node.events,
                node.status,
                num_starts=node.num_starts,
                episodes=node.episodes,
                trains=Role.TRAINER in node.roles,
            )
            for node in run.nodes
        ),
        began_at_s=run.began_at_s,
        first_step_at_s=run.first_step_at_s,
        ended_at_s=run.ended_at_s,
    )


def judge(runs: Sequence[SwarmRun]) -> Invariants:
    """Checks every event of every node, in order of time, against the invariants; returns the invariants.

    A node outside the runs may have joined: of its groups the admission alone is judged.

    Events of groups that were put come first, since clocks of processes may disagree by less than a message takes.
    """
    invariants = Invariants(known=frozenset(node.node_id for run in runs for node in run.nodes))
    for run in runs:
        ids = [node.node_id for node in run.nodes]
        events = [(node_id, event) for node_id, node in zip(ids, run.nodes, strict=True) for event in node.events]
        for node_id, event in events:
            if isinstance(event, KNOWN_FIRST):
                invariants.check(node_id, event)
        for node_id, event in sorted(events, key=lambda pair: pair[1].at_s):
            if not isinstance(event, KNOWN_FIRST):
                invariants.check(node_id, event)
        dead = {name for name, _ in run.options.kill if not run.options.restart} | {
            name for name, _ in run.options.stop
        }
        trainers = [node for node in run.nodes if Role.TRAINER in node.roles]
        steps = {node.node_id: _last_step(node) for node in trainers if _last_step(node) or not run.was_stopped}
        invariants.finish(steps, frozenset(node.node_id for node in run.nodes if node.name in dead))
        for config, node in zip(node_configs(run.options, Path()), run.nodes, strict=True):
            status = node.status
            invariants.bound(node.node_id, "replay groups", status.get("replay_groups", 0), config.replay.max_groups)
            invariants.bound(node.node_id, "replay bytes", status.get("replay_bytes", 0), config.replay.max_bytes)
    return invariants


def _last_step(node: NodeRun) -> int:
    return max((made.step for made in events_of(StepMade, node.events)), default=0)


def _describe(options: SimulationOptions) -> dict[str, Any]:
    """The options that are set (not None, empty, False or 0), for the report."""
    return {key: value for key, value in asdict(options).items() if value not in (None, (), {}, False, 0.0)}
