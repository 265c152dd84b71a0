"""The command line `swarm-node`."""

import asyncio
from pathlib import Path
from typing import Annotated, Final

import typer

from swarm.command_line import DirectoryCommand, DirectoryLastCommand, load_in_place
from swarm.config import NodeConfig
from swarm.process import errors_explained, silence_grpc

KEY: Final = "identity.key"
DIRECTORY: Final = "swarm-node"

Directory = Annotated[
    Path | None, typer.Argument(help="Directory of the node. Default: swarm-node.", show_default=False)
]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A node.toml elsewhere, in place of the directory.")
]

app = typer.Typer(help="Run one node of a swarm.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Run one node of a swarm."""


@app.command(cls=DirectoryCommand)
def start(
    directory: Directory = None,
    config: Config = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: --set replay.max_age_steps=2. Repeatable.")
    ] = None,
) -> None:
    """Start the node of a directory and run until Ctrl-C or SIGTERM; a second Ctrl-C does not wait.

    State (key, rollout store, checkpoints, events.jsonl, status.json) lives in the directory, or with --config in
    `dir` of that file; starting again there resumes.
    """
    from node.daemon import run_daemon
    from swarm.telemetry import setup_logging

    with errors_explained():
        settings = _settings(directory, config, set_ or [])
        setup_logging(settings.telemetry.log_level, settings.telemetry.log_format, settings.shown_name)
        asyncio.run(run_daemon(settings))


def _settings(directory: Path | None, config: Path | None, overrides: list[str]) -> NodeConfig:
    """Configuration of the node that a directory or --config names.

    Its `dir` is the directory of node.toml if that one has the node's key and `dir` has none: `swarm join` writes `dir`
    as it was typed, and from another working directory it would begin a new node. A `dir` set by --set stays.
    """
    settings, path = load_in_place(NodeConfig, directory, config, overrides, DIRECTORY)
    is_set = any(each.partition("=")[0].strip() == "dir" for each in overrides)
    if is_set or (settings.dir / KEY).exists() or not (path.parent / KEY).exists():
        return settings
    typer.echo(f"{path}: dir is {str(settings.dir)!r}, where no node is; the node is in {path.parent}", err=True)
    return settings.model_copy(update={"dir": path.parent})


@app.command("id", cls=DirectoryCommand)
def show_id(directory: Directory = None) -> None:
    """Print this node's id, by which a member invites it; its key is made on first use."""
    from swarm.process import load_or_create_identity

    with errors_explained():
        typer.echo(load_or_create_identity((directory or Path(DIRECTORY)) / KEY).node_id)


@app.command(cls=DirectoryLastCommand)
def invite(
    node_id: Annotated[str, typer.Argument(help="Id of the invited node, as its `swarm-node id` prints it.")],
    directory: Directory = None,
    config: Config = None,
    days: Annotated[float, typer.Option(min=0.01, max=400, help="How long the invitation is good.")] = 30.0,
) -> None:
    """Invite a node into the run: prints a text for `swarm join LINK --invitation TEXT`.

    Only members of the run's list invite (entry.members). You answer for the invited node: together with you it has the
    influence that you had alone.
    """
    from swarm.clock import SystemClock
    from swarm.errors import ConfigError
    from swarm.identity import Identity
    from swarm.wire.credentials import invite
    from swarm.wire.held_manifest import load_held, with_held

    with errors_explained():
        settings = _settings(directory, config, [])
        settings = with_held(settings, load_held(settings.dir, settings.run_id))
        identity = Identity.load(settings.dir / KEY)
        if identity.node_id not in settings.entry.members:
            raise ConfigError(
                f"{settings.dir}: entry.members does not list this node, {identity.node_id}: only members invite; "
                "ask the run's operator to list it, or a member to invite the other one"
            )
        typer.echo(invite(identity, settings.run_id, node_id, days, SystemClock().now_s()))


def main() -> None:
    """Entry point of `swarm-node`."""
    silence_grpc()
    app()


if __name__ == "__main__":
    main()
