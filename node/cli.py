"""The command line `swarm-node`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from swarm.config import NodeConfig, load_config
from swarm.errors import SwarmError

app = typer.Typer(help="Run one node of a swarm.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Run one node of a swarm."""


@app.command()
def start(
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration of the node (TOML).")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: --set replay.max_age_steps=2. Repeatable.")
    ] = None,
) -> None:
    """Start the node and run until Ctrl-C or SIGTERM; a second Ctrl-C does not wait.

    State (key, rollout store, checkpoints, events.jsonl, status.json) lives in the directory `dir` of
    the configuration; starting again there resumes.
    """
    from node.daemon import run_daemon
    from swarm.telemetry import setup_logging

    try:
        settings = load_config(NodeConfig, config, set_)
        setup_logging(settings.telemetry.log_level, settings.telemetry.log_format, settings.name)
        asyncio.run(run_daemon(settings))
    except SwarmError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of `swarm-node`."""
    app()


if __name__ == "__main__":
    main()
