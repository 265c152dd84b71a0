"""The command line `swarm`: one function per command, here or beside this file.

Invariant: importing this file is cheap (no torch, no gRPC); each command imports what it needs.
"""

import asyncio
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option
from typer.core import TyperGroup

from swarm import __version__
from swarm.cli.bench import bench
from swarm.cli.check import check
from swarm.cli.eval_command import evaluate
from swarm.cli.pause import pause, resume
from swarm.cli.plan import plan_command
from swarm.cli.recipes import recipes_app
from swarm.cli.report import report, trace, watch
from swarm.cli.serve import serve
from swarm.cli.shared_options import MaxDisk, MaxUpload, Threads, Trust, machine_overrides
from swarm.cli.simulate import simulate
from swarm.cli.train import train
from swarm.cli.trained import chat, export, samples, verify
from swarm.cli.why import why
from swarm.command_line import DirectoryCommand, DirectoryLastCommand, waiting
from swarm.config import config_file
from swarm.process import errors_explained, silence_grpc
from swarm.types import Role


class _Commands(TyperGroup):
    """Command group of `swarm`, which explains errors."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; an error of this project becomes a line and exit code 2."""
        with errors_explained():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Train a language model by reinforcement learning together with machines you do not control.",
    no_args_is_help=True,
    add_completion=False,
)
keys_app = typer.Typer(help="The Ed25519 identity of a node.", no_args_is_help=True)
app.command()(simulate)
app.command(cls=DirectoryCommand)(train)
app.command()(check)
app.command("plan")(plan_command)
app.command("eval", cls=DirectoryCommand)(evaluate)
app.command(cls=DirectoryCommand)(chat)
app.command(cls=DirectoryCommand)(serve)
app.command(cls=DirectoryCommand)(export)
app.command()(verify)
app.command(cls=DirectoryCommand)(samples)
app.command(cls=DirectoryCommand)(report)
app.command(cls=DirectoryCommand)(watch)
app.command(cls=DirectoryLastCommand)(trace)
app.command(cls=DirectoryCommand)(why)
app.command(cls=DirectoryCommand)(pause)
app.command(cls=DirectoryCommand)(resume)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
app.add_typer(keys_app, name="keys")
app.add_typer(recipes_app, name="recipes")
console = Console()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(f"{__version__}{_commit()}", highlight=False)
        raise typer.Exit


@app.command(cls=DirectoryLastCommand)
def join(
    link: Annotated[str, Argument(help="swarm://host:port/RUN#FINGERPRINT, as printed by the coordinator.")],
    directory: Annotated[Path, Argument(help="Directory for the key, rollouts and checkpoints of this node.")] = Path(
        "swarm-node"
    ),
    set_: Annotated[list[str] | None, Option("--set", help="Override one key of the configuration.")] = None,
    generate: Annotated[bool, Option("--generate", help="Only generate, with the weights of a trainer.")] = False,
    invitation: Annotated[
        str, Option("--invitation", help="Text that `swarm-node invite` printed for this node.")
    ] = "",
    threads: Threads = None,
    max_upload: MaxUpload = "",
    max_disk: MaxDisk = "",
    only_write: Annotated[bool, Option("--only-write", help="Write node.toml and stop.")] = False,
    trust: Trust = False,
) -> None:
    """Join a swarm by its link: fetch the signed manifest, write node.toml, start the node.

    The manifest names tasks, model and limits; it cannot make this machine run code of others.
    """
    with waiting("loading the packages"):
        from node.join import join_swarm

    roles = (Role.GENERATOR,) if generate else ()
    overrides = [*machine_overrides(threads, max_upload, max_disk), *(set_ or [])]
    asyncio.run(join_swarm(link, directory, overrides, not only_write, typer.echo, roles, invitation, is_trusted=trust))


@app.command(cls=DirectoryCommand)
def status(
    directory: Annotated[Path, Argument(help="Directory of the node.")] = Path("swarm-node"),
    as_json: Annotated[bool, Option("--json", help="Machine-readable.")] = False,
    max_idle_s: Annotated[float, Option(help="Most seconds without a step or a sign of work.")] = 300.0,
) -> None:
    """Show if a node learned, and its state; exit code 1, with the reason, if it makes no progress."""
    from node.status import disk_bytes, learning_lines, problems, read_status, status_rows
    from swarm.printable import one_line
    from swarm.process import is_running
    from swarm.trained.learning_evidence import read_learning

    figures = read_status(directory) | {"disk_bytes": disk_bytes(directory)}
    found = problems(figures, time.time(), max_idle_s, is_running(directory), directory)
    learned = learning_lines(figures, read_learning(directory))
    if as_json:
        typer.echo(json.dumps({**figures, "learning": learned, "problems": found}, indent=2))
    else:
        for line in learned:
            console.print(one_line(line), markup=False, highlight=False, soft_wrap=True, style="bold")
        for key, value in status_rows(figures):
            console.print(f"{key:<18} {one_line(value)}", markup=False, highlight=False, soft_wrap=True)
        for problem in found:
            console.print("[red]problem:[/red]", escape(problem), soft_wrap=True)
    raise typer.Exit(1 if found else 0)


@app.command()
def doctor(
    link: Annotated[
        str | None,
        Argument(metavar="[LINK|DIR]", help="Link of a run, to check the network for it; or directory of a node."),
    ] = None,
    directory: Annotated[
        Path | None,
        Option("--dir", help="Directory of a node; with a link: the node whose key and invitation are shown."),
    ] = None,
    config: Annotated[Path | None, Option("--config", "-c", help="node.toml to check, in place of defaults.")] = None,
    as_json: Annotated[bool, Option("--json", help="Machine-readable.")] = False,
    trust: Trust = False,
) -> None:
    """Check this machine: packages, ports, clock, disk, memory, sandbox, peers. Every finding has its fix.

    With a LINK, check only the network, before joining that run: whether other nodes can dial this machine, which
    outgoing connections work, how long idle connections are kept, what that means for a node here, and what would
    improve it.
    """
    if link is not None and link.strip() and not link.strip().startswith("swarm://") and Path(link).exists():
        link, directory = None, Path(link)
    if link is not None:
        from node.network_check import check_network
        from swarm.wire.join_link import JoinLink

        JoinLink.parse(link)  # a wrong link is refused before the wait
        typer.echo("asking the run's coordinator to dial back; about 20 seconds", err=True)
        with waiting("waiting for the coordinator and its nodes to dial back", is_quiet=as_json):
            report = asyncio.run(check_network(link, directory))
        typer.echo(json.dumps(asdict(report)) if as_json else "\n".join(report.lines()))
        raise typer.Exit(1 if report.has_wrong_clock else 0)
    from node.doctor import examine

    named = None if directory is None and config is None else config_file(directory, config)
    with waiting("trying this machine, and what the configuration names", is_quiet=as_json):
        findings = asyncio.run(examine(named, trust))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = (
                "[green]ok[/green]  "
                if finding.is_ok
                else ("[red]fail[/red]" if finding.is_fatal else "[yellow]warn[/yellow]")
            )
            console.print(f"{mark} {escape(finding.name)}: {escape(finding.detail)}")
            if not finding.is_ok:
                console.print(f"       fix: {escape(finding.fix)}", soft_wrap=True)  # a command is copied whole
    raise typer.Exit(1 if any(f.is_fatal and not f.is_ok for f in findings) else 0)


@keys_app.command("new")
def keys_new(path: Annotated[Path, Argument(help="File to write; never overwritten.")]) -> None:
    """Make a new identity."""
    from swarm.identity import Identity

    identity = Identity.create()
    identity.save(path)
    console.print(f"node id {identity.node_id}\nsaved to {path} (keep it secret; it is this node's name)")


@keys_app.command("show")
def keys_show(path: Annotated[Path, Argument(help="Key file, such as <dir>/identity.key.")]) -> None:
    """Show the node id of a key file."""
    from swarm.identity import Identity

    console.print(Identity.load(path).node_id)


def _commit() -> str:
    """Commit of the checkout that the package runs from, in brackets; "" without a checkout or git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or not its checkout
        return ""
    return f" ({found})"


def main() -> None:
    """Entry point of `swarm`."""
    silence_grpc()
    app()


if __name__ == "__main__":
    main()
