"""The command line `swarm`: simulate, join, status, doctor, keys, recipes, check.

Invariant: importing this file is cheap (no torch, no gRPC); each command imports what it needs.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from swarm import __version__
from swarm.errors import ConfigError, SwarmError

app = typer.Typer(
    help="Train a language model by reinforcement learning together with machines you do not control.",
    no_args_is_help=True,
    add_completion=False,
)
keys_app = typer.Typer(help="The Ed25519 identity of a node.", no_args_is_help=True)
recipes_app = typer.Typer(help="Objectives that a learner can use.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(recipes_app, name="recipes")
console = Console()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit


@app.command()
def simulate(
    preset: Annotated[
        str, typer.Option(help="smollm (2 nodes, a real chat model) or tiny (8 nodes, seconds).")
    ] = "smollm",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Optimizer steps of each node.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after this long, whatever was reached.")] = None,
    mix: Annotated[str, typer.Option(help="Local:external groups of each step, such as 4:4; 8:0 never shares.")] = "",
    recipe: Annotated[str, typer.Option(help="Objective: see `swarm recipes list`.")] = "swarm_sampling",
    seed: Annotated[int, typer.Option(help="Of tasks, sampling and draws.")] = 0,
    foreign: Annotated[
        Literal["all", "positive"],
        typer.Option(help="positive: drop foreign rollouts with negative advantage; all: keep."),
    ] = "positive",
    slow: Annotated[list[str] | None, typer.Option(help="NODE=FACTOR: this node takes FACTOR times as long.")] = None,
    kill: Annotated[list[str] | None, typer.Option(help="NODE@SECONDS (or coordinator@SECONDS): kill -9.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="NODE@SECONDS: SIGSTOP.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Killed processes come back after 5 seconds.")] = False,
    latency_ms: Annotated[float, typer.Option(help="Delay of every group from a peer.")] = 0.0,
    barrier: Annotated[bool, typer.Option("--barrier", help="Synchronous rounds, for comparison.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Generate and learn strictly in turn.")
    ] = False,
    compare: Annotated[str, typer.Option(help="silo: run the same without sharing too, and report both.")] = "",
    virtual: Annotated[
        bool, typer.Option("--virtual", help="The whole swarm in this process on virtual time.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of every node: --set learner.learning_rate=2e-5.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of state and report. Default: runs/<preset>-<time>.")
    ] = None,
) -> None:
    """Run a real swarm on this machine and report what it did.

    A coordinator and every node are separate processes that find each other through the DHT and exchange
    rollouts over authenticated gRPC. Exit code 0 only if the run's invariants hold.
    """
    from swarm.simulate.presets import SimulationOptions

    with _errors():
        options = SimulationOptions(
            preset=preset,
            nodes=nodes,
            rounds=rounds,
            minutes=minutes,
            mix=_mix(mix),
            recipe=recipe,
            seed=seed,
            slow=dict(_pair(text, "=") for text in slow or []),
            kill=tuple(_pair(text, "@") for text in kill or []),
            stop=tuple(_pair(text, "@") for text in stop or []),
            restart=restart,
            latency_ms=latency_ms,
            barrier=barrier,
            deterministic=deterministic,
            foreign=foreign,
            overrides=tuple(set_ or ()),
            out=out,
        )
        if compare not in ("", "silo"):
            raise ConfigError(f"--compare {compare}: only silo is known")
        if virtual:
            from swarm.simulate.virtual_run import run_virtual_command

            holds = run_virtual_command(num_nodes=nodes or 10, num_steps=rounds or 50, seed=seed, console=console)
        else:
            from swarm.simulate.command import run_command

            directory = out or Path("runs") / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
            holds = run_command(options, directory, compare == "silo", console)
        raise typer.Exit(0 if holds else 1)


@app.command()
def join(
    link: Annotated[str, typer.Argument(help="swarm://host:port/RUN#FINGERPRINT, as printed by the coordinator.")],
    dir: Annotated[Path, typer.Option(help="Where this node keeps its key, rollouts and checkpoints.")] = Path(
        "swarm-node"
    ),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key of the configuration.")] = None,
    only_write: Annotated[bool, typer.Option("--only-write", help="Write node.toml and stop.")] = False,
) -> None:
    """Join a swarm by its link: fetch the signed manifest, write node.toml, start the node.

    The manifest names tasks, model and limits; it can never make this machine run code of others.
    """
    from node.join import join_swarm

    with _errors():
        asyncio.run(join_swarm(link, dir, set_ or [], start=not only_write, say=console.print))


@app.command()
def status(
    dir: Annotated[Path, typer.Option(help="Directory of the node.")] = Path("swarm-node"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    max_idle_s: Annotated[float, typer.Option(help="No optimizer step for this long is a failure.")] = 300.0,
) -> None:
    """Show what a node does; exit code 1 with the reason when it does not make progress."""
    from node.status import problems, read_status
    from swarm.process import is_running

    with _errors():
        figures = read_status(dir)
        found = problems(figures, time.time(), max_idle_s, is_running(dir))
    if as_json:
        typer.echo(json.dumps({**figures, "problems": found}, indent=2))
    else:
        _print_status(figures)
        for problem in found:
            console.print(f"[red]problem:[/red] {problem}")
    raise typer.Exit(1 if found else 0)


def _print_status(figures: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for key in (
        "name",
        "node_id",
        "run_id",
        "step",
        "peers",
        "num_local_used",
        "num_external_used",
        "refusals",
        "evaluations",
    ):
        table.add_row(key, str(figures.get(key, "")))
    console.print(table)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration to check; defaults without.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check this machine: packages, ports, clock, disk, memory, sandbox, peers. Every finding has its fix."""
    from node.doctor import examine

    with _errors():
        findings = asyncio.run(examine(config))
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = (
                "[green]ok[/green]  "
                if finding.is_ok
                else ("[red]fail[/red]" if finding.is_fatal else "[yellow]warn[/yellow]")
            )
            console.print(f"{mark} {finding.name}: {finding.detail}")
            if not finding.is_ok:
                console.print(f"       fix: {finding.fix}")
    raise typer.Exit(1 if any(f.is_fatal and not f.is_ok for f in findings) else 0)


@app.command()
def check(
    config: Annotated[Path, typer.Option("--config", "-c", help="node.toml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key.")] = None,
) -> None:
    """Validate a node's configuration, its recipe included, without starting anything."""
    from swarm.config import NodeConfig, load_config

    with _errors():
        settings = load_config(NodeConfig, config, set_)
        from swarm.learn.supply import check_supply, supplied_by
        from swarm.recipes import load_recipe

        recipe = load_recipe(settings.learner.recipe, settings.learner.recipe_params)
        check_supply(recipe, supplied_by(settings))
    console.print(f"{config}: valid; recipe {recipe.name} ({recipe.acronym})")


@keys_app.command("new")
def keys_new(path: Annotated[Path, typer.Argument(help="File to write; never overwritten.")]) -> None:
    """Make a new identity."""
    from swarm.identity import Identity

    with _errors():
        identity = Identity.create()
        identity.save(path)
    console.print(f"node id {identity.node_id}\nsaved to {path} (keep it secret; it is this node's name)")


@keys_app.command("show")
def keys_show(path: Annotated[Path, typer.Argument(help="Key file, such as <dir>/identity.key.")]) -> None:
    """Show the node id of a key file."""
    from swarm.identity import Identity

    with _errors():
        console.print(Identity.load(path).node_id)


@recipes_app.command("list")
def recipes_list(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List the built-in objectives."""
    from swarm.recipes import list_recipes, load_recipe

    columns = ("name", "acronym", "arxiv", "scope", "verification", "title")
    rows = [{column: str(getattr(load_recipe(name), column)) for column in columns} for name in list_recipes()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None)
    for column in columns:
        width = 20 if column == "title" else max(len(row[column]) for row in rows)
        table.add_column(column, no_wrap=True, overflow="ellipsis", min_width=width)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _mix(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    local, separator, external = text.partition(":")
    if not separator or not local.isdigit() or not external.isdigit():
        raise ConfigError(f"--mix {text}: expected local:external, such as 4:4")
    return int(local), int(external)


def _pair(text: str, separator: str) -> tuple[str, float]:
    name, _, number = text.partition(separator)
    try:
        return name, float(number)
    except ValueError:
        raise ConfigError(f"{text}: expected NAME{separator}NUMBER") from None


class _errors:
    """Turns our own errors into one red line and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SwarmError):
            Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] {error}", soft_wrap=True)
            raise typer.Exit(2)


def main() -> None:
    """Entry point of `swarm`."""
    app()


if __name__ == "__main__":
    main()
