"""The command line `swarm-coordinator`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from swarm.config import CoordinatorConfig, load_config
from swarm.process import errors_explained, silence_grpc

app = typer.Typer(help="Run the coordinator of a swarm.", no_args_is_help=True, add_completion=False)


@app.command()
def start(
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration of the coordinator (TOML).")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: --set listen=0.0.0.0:7000. Repeatable.")
    ] = None,
) -> None:
    """Start the coordinator; it prints the link that others join with.

    It tracks members, policy versions and the off-policyness of each source. It never sees a
    rollout or a weight, and a swarm goes on without it. Starting again in the same directory resumes.
    """
    from coordinator.daemon import run_coordinator
    from swarm.telemetry import setup_logging

    with errors_explained():
        settings = load_config(CoordinatorConfig, config, set_)
        setup_logging(settings.telemetry.log_level, settings.telemetry.log_format, "coordinator")
        asyncio.run(run_coordinator(settings))


@app.command()
def link(
    dir: Annotated[Path, typer.Option(help="Directory of the coordinator.")] = Path("swarm-coordinator"),
) -> None:
    """Print the join link of the coordinator that runs in a directory."""
    from coordinator.daemon import read_info

    with errors_explained():
        typer.echo(read_info(dir)["link"])


@app.command()
def invite(
    node_id: Annotated[str, typer.Argument(help="Id of the invited node, as its `swarm-node id` prints it.")],
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration of the coordinator (TOML).")],
    days: Annotated[float, typer.Option(min=0.01, max=400, help="How long the invitation is good.")] = 30.0,
) -> None:
    """Invite a node into the run: prints a text for `swarm join LINK --invitation TEXT`.

    The node counts as if it were on the run's list (node.entry.members), but invites nobody itself.
    """
    from swarm.clock import SystemClock
    from swarm.identity import Identity
    from swarm.wire.credentials import invite

    with errors_explained():
        settings = load_config(CoordinatorConfig, config)
        identity = Identity.load(settings.dir / "identity.key")
        typer.echo(invite(identity, settings.run_id, node_id, days, SystemClock().now_s()))


@app.command()
def rotate(
    key: Annotated[Path, typer.Argument(help="File of the next key, which next_key of the configuration named.")],
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration of the coordinator (TOML).")],
) -> None:
    """Replace a lost or stolen key of the coordinator by the next one; stop the coordinator first.

    Nodes that saw a manifest with this next_key follow within minutes and refuse the old key from then on. Give out the
    new join link, and name another next_key in the configuration.
    """
    from coordinator.manifest_signing import rotate_key

    with errors_explained():
        settings = load_config(CoordinatorConfig, config)
        typer.echo(
            f"the coordinator's key is now {rotate_key(settings, key).node_id}; set another next_key, and start it"
        )


def main() -> None:
    """Entry point of `swarm-coordinator`."""
    silence_grpc()
    app()


if __name__ == "__main__":
    main()
