"""The command line `swarm-coordinator`."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from swarm.command_line import DirectoryCommand, load_in_place, waiting
from swarm.config import CoordinatorConfig
from swarm.process import errors_explained, is_running, silence_grpc

DIRECTORY: Final = "swarm-coordinator"
GRACE_S: Final = 20.0  # for one that was started beside this command, and still loads its packages
LOOK_S: Final = 0.2

Directory = Annotated[
    Path | None, typer.Argument(help="Directory with coordinator.toml. Default: swarm-coordinator.", show_default=False)
]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A coordinator.toml elsewhere, in place of the directory.")
]

app = typer.Typer(help="Run the coordinator of a swarm.", no_args_is_help=True, add_completion=False)


@app.command()
def start(
    directory: Directory = None,
    config: Config = None,
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
        settings = _settings(directory, config, set_)
        setup_logging(settings.telemetry.log_level, settings.telemetry.log_format, "coordinator")
        asyncio.run(run_coordinator(settings))


@app.command(cls=DirectoryCommand)
def link(directory: Directory = None) -> None:
    """Print the join link of the coordinator that runs in a directory; wait for one that starts."""
    from coordinator.daemon import INFO, read_info

    where, began_s = directory or Path(DIRECTORY), time.monotonic()
    with errors_explained():
        with waiting(f"{where}: no coordinator yet; looking for {GRACE_S:.0f} s") as wait:
            while not (where / INFO).exists() and (is_running(where) or time.monotonic() - began_s < GRACE_S):
                if is_running(where):
                    wait.now(f"{where}: the coordinator is starting")
                time.sleep(LOOK_S)
        typer.echo(read_info(where)["link"])


@app.command()
def invite(
    node_id: Annotated[str, typer.Argument(help="Id of the invited node, as its `swarm-node id` prints it.")],
    directory: Directory = None,
    config: Config = None,
    days: Annotated[float, typer.Option(min=0.01, max=400, help="How long the invitation is good.")] = 30.0,
) -> None:
    """Invite a node into the run: prints a text for `swarm join LINK --invitation TEXT`.

    The node counts as if it were on the run's list (node.entry.members), but invites nobody itself.
    """
    from swarm.clock import SystemClock
    from swarm.identity import Identity
    from swarm.wire.credentials import invite

    with errors_explained():
        settings = _settings(directory, config)
        identity = Identity.load(settings.dir / "identity.key")
        typer.echo(invite(identity, settings.run_id, node_id, days, SystemClock().now_s()))


@app.command()
def rotate(
    key: Annotated[Path, typer.Argument(help="File of the next key, which next_key of the configuration named.")],
    directory: Directory = None,
    config: Config = None,
) -> None:
    """Replace a lost or stolen key of the coordinator by the next one; stop the coordinator first.

    Nodes that saw a manifest with this next_key follow within minutes and refuse the old key from then on. Give out the
    new join link, and name another next_key in the configuration.
    """
    from coordinator.manifest_signing import rotate_key

    with errors_explained():
        settings = _settings(directory, config)
        typer.echo(
            f"the coordinator's key is now {rotate_key(settings, key).node_id}; set another next_key, and start it"
        )


def _settings(directory: Path | None, config: Path | None, overrides: list[str] | None = None) -> CoordinatorConfig:
    return load_in_place(CoordinatorConfig, directory, config, overrides or [], DIRECTORY)[0]


def main() -> None:
    """Entry point of `swarm-coordinator`."""
    silence_grpc()
    app()


if __name__ == "__main__":
    main()
