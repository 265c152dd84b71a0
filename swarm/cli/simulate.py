"""`swarm simulate`: checks the options of the command and turns them into a SimulationOptions.

Invariant: importing this file is cheap; the modules of a run are imported when it begins.
"""

import math
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from typer import Option

from swarm.command_line import waiting
from swarm.errors import ConfigError

VIRTUAL_TAKES = ("virtual", "episodes", "outward", "nodes", "rounds", "seed")


def simulate(
    context: typer.Context,
    preset: Annotated[
        str,
        Option(
            help="smollm (2 peers, a real chat model), tiny (8 peers, seconds), agents (2 peers, the chat model over "
            "several turns), tiny-agents (4 tiny peers, episodes too), echo (a trainer and generators), echo-tiny."
        ),
    ] = "smollm",
    nodes: Annotated[int | None, Option(min=1, help="Number of nodes.")] = None,
    rounds: Annotated[int | None, Option(min=1, help="Optimizer steps of each node.")] = None,
    minutes: Annotated[
        float | None,
        Option(min=0, help="Minutes after the first group at which the run stops."),
    ] = None,
    mix: Annotated[str, Option(help="LOCAL:EXTERNAL groups of each step, such as 4:4; 8:0 never shares.")] = "",
    recipe: Annotated[str, Option(help="Objective: see `swarm recipes list`. Default: the preset's.")] = "",
    seed: Annotated[int, Option(min=0, help="Seed of tasks, sampling and draws.")] = 0,
    external: Annotated[
        Literal["all", "positive"], Option(help="positive: drop external rollouts with negative advantage; all: keep.")
    ] = "positive",
    slow: Annotated[list[str] | None, Option(help="NODE=FACTOR: this node takes FACTOR times as long.")] = None,
    kill: Annotated[list[str] | None, Option(help="NODE@SECONDS (or coordinator@SECONDS): kill -9.")] = None,
    stop: Annotated[list[str] | None, Option(help="NODE@SECONDS: SIGSTOP.")] = None,
    restart: Annotated[bool, Option("--restart", help="Killed processes come back after 5 seconds.")] = False,
    latency_ms: Annotated[float, Option(min=0, help="Milliseconds by which every group from a peer is late.")] = 0.0,
    barrier: Annotated[bool, Option("--barrier", help="Synchronous rounds: each step waits for all nodes.")] = False,
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="Generate and learn in turn: one node repeats bit for bit.",
        ),
    ] = False,
    compare: Annotated[
        list[str] | None,
        Option(
            help="Second run, reported beside it. silo: the same without sharing; colocated (echo): one node does "
            "both; else a recipe (repeatable): all recipes in one table."
        ),
    ] = None,
    seeds: Annotated[
        int, Option(min=1, max=64, help="With --compare RECIPE: runs of each, with --seed and the next ones.")
    ] = 1,
    mode: Annotated[
        Literal["push", "pull", "synchronous"],
        Option(
            help="echo: the way in which generators take new versions; synchronous: each step waits for all of them."
        ),
    ] = "push",
    virtual: Annotated[
        bool,
        Option(
            "--virtual",
            help="The swarm in one process on virtual time; with --nodes, --rounds, --seed, --episodes, --outward.",
        ),
    ] = False,
    episodes: Annotated[bool, Option("--episodes", help="With --virtual: episodes of several turns.")] = False,
    outward: Annotated[
        float | None,
        Option(
            "--outward",
            min=0.0,
            max=1.0,
            help="With --virtual: share of nodes that nobody can dial.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option("--set", help="Key of every node, or of one: seed=2, ada:compute_dtype=float32."),
    ] = None,
    out: Annotated[Path | None, Option(help="Directory of state and report. Default: runs/<preset>-<time>.")] = None,
    keep_checkpoints: Annotated[
        bool, Option("--keep-checkpoints", help="Keep checkpoints: 3 GB for each SmolLM2 learner.")
    ] = False,
) -> None:
    """Run a real swarm on this machine and report its course.

    A coordinator and every node are separate processes that find each other through the DHT and exchange
    rollouts over authenticated gRPC. Exit code 0 only if the run's invariants hold.
    """
    if virtual:
        _refuse_beside_virtual(context)
        from swarm.simulate.virtual.run import run_virtual_command

        num_nodes, num_rounds = 10 if nodes is None else nodes, 50 if rounds is None else rounds
        _end(run_virtual_command(num_nodes, num_rounds, seed, Console(), has_episodes=episodes, outward_share=outward))
    if episodes:
        raise ConfigError("--episodes: applies to --virtual alone; the presets name their environments")
    if outward is not None:
        raise ConfigError("--outward: applies to --virtual alone; local processes all listen on this machine")
    from swarm.simulate.presets import SimulationOptions

    options = SimulationOptions(
        preset=preset,
        nodes=nodes,
        rounds=rounds,
        minutes=minutes,
        mix=_mix(mix),
        recipe=recipe,
        seed=seed,
        slow=dict(_pair("--slow", text, "=FACTOR", least=1.0) for text in slow or []),
        kill=tuple(_pair("--kill", text, "@SECONDS") for text in kill or []),
        stop=tuple(_pair("--stop", text, "@SECONDS") for text in stop or []),
        restart=restart,
        latency_ms=latency_ms,
        barrier=barrier,
        deterministic=deterministic,
        external=external,
        mode=mode,
        overrides=tuple(set_ or ()),
        keep_checkpoints=keep_checkpoints,
    )
    with waiting("loading the packages"):
        from swarm.simulate.command import compare_recipes, run_command

    directory = out or Path("runs") / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    rivals = [each for each in compare or () if each in ("silo", "colocated")]
    if rivals and (len(compare or ()) > 1 or seeds > 1):
        raise ConfigError(f"--compare {rivals[0]}: is one second run; --seeds and further --compare go with recipes")
    if seeds > 1 and not compare:
        raise ConfigError(f"--seeds {seeds}: compares recipes over seeds; name another one with --compare RECIPE")
    if compare and not rivals:
        _end(compare_recipes(options, compare, seeds, directory, Console()))
    _end(run_command(options, directory, rivals[0] if rivals else "", Console()))


def _refuse_beside_virtual(context: typer.Context) -> None:
    """Raises ConfigError with the given options that a virtual swarm would ignore."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in VIRTUAL_TAKES and _is_given(context, option.name)
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: does not apply to --virtual, which takes --nodes, --rounds, --seed, --episodes and "
            "--outward"
        )


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _end(holds: bool) -> None:
    raise typer.Exit(0 if holds else 1)


def _mix(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    local, separator, external = text.partition(":")
    if not separator or not local.isdigit() or not external.isdigit():
        raise ConfigError(f"--mix {text}: expected local:external, such as 4:4")
    if not int(local) + int(external):
        raise ConfigError(f"--mix {text}: a step would have nothing to learn from; such as 4:4")
    return int(local), int(external)


def _pair(option: str, text: str, form: str, least: float = 0.0) -> tuple[str, float]:
    """Parses an option's value such as `node-1=2.5` into its name and number.

    Args:
        form: separator, and what messages call the number, such as `=FACTOR`.
        least: smallest number allowed.

    Raises:
        ConfigError: the number is missing, not finite, or below `least`.
    """
    name, _, number = text.partition(form[0])
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"{option} {text}: expected NODE{form}") from None
    if not least <= value < math.inf:
        raise ConfigError(f"{option} {text}: {form[1:]} is at least {least:g}")
    return name, value
