"""`swarm why`: the likeliest causes why a node does not learn, or learns badly, with figures and fixes."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from swarm.printable import printable

if TYPE_CHECKING:
    from swarm.diagnosis import Diagnosed

console = Console()


def why(
    directory: Annotated[Path, Argument(help="Directory of the node, running, stopped or crashed.")] = Path(
        "swarm-node"
    ),
    as_json: Annotated[bool, Option("--json", help="Machine-readable.")] = False,
    max_idle_s: Annotated[float, Option(help="Most seconds without a step or a sign of work.")] = 300.0,
) -> None:
    """Show if a node learned, then why it does not: the likeliest cause first, with figures and the fix.

    The first line is held-out success before and after, with a 95 % interval; `nothing is wrong` is printed
    only where that interval lies above zero. Only files of the node are read: status.json, events.jsonl,
    warnings.jsonl, node.toml, groups.sqlite, log.txt. Exit code 0: no fault is known; 1: something is
    wrong, or it did not learn; 2: the directory is not of a node.
    """
    from swarm.diagnosis import diagnose, health_words, is_healthy, read_snapshot
    from swarm.trained.learning_evidence import warm_up_words

    snapshot = read_snapshot(directory, time.time(), max_idle_s)
    found = diagnose(snapshot)
    is_unshown = snapshot.is_trainer and not snapshot.learning.is_shown
    if as_json:
        plain = [asdict(each) | {"gravity": each.weight.name.lower()} for each in found]
        verdict = {"learned": snapshot.learning.verdict, "evidence": snapshot.learning.lines}
        healthy = None if is_unshown and is_healthy(found) else is_healthy(found)
        typer.echo(json.dumps({"is_healthy": healthy, **verdict, "findings": plain}, indent=1))
        raise typer.Exit(0 if is_healthy(found) else 1)
    if snapshot.is_trainer:
        for line in snapshot.learning.lines:
            _print(line, style="bold" if line == snapshot.learning.words else "")
        if line := warm_up_words(snapshot.events):
            _print(line)
    if is_healthy(found):
        rewards = snapshot.course("reward_mean")
        newest = f", mean reward of the newest step {rewards[-1]:.2f}" if rewards else ""
        healthy = health_words(snapshot.learning) if snapshot.is_trainer else "nothing is wrong"
        _print(f"{healthy}: {len(snapshot.made)} steps{newest}" + ("; good to know:" if found else ""))
    for number, each in enumerate(found, 1):
        _print_finding(number, each)
    raise typer.Exit(0 if is_healthy(found) else 1)


def _print_finding(number: int, found: "Diagnosed") -> None:
    harm = found.weight.name.lower()
    style = "dim" if harm == "note" else "bold" if number == 1 else ""
    _print(f"{number}. {found.claim}  [{found.name}: {harm}]", style=style)
    for line in found.evidence:
        _print(f"   - {line}")
    if found.fix:
        _print(f"   fix: {found.fix}")
    _print(f"   more: {found.docs}", style="dim")


def _print(text: str, style: str = "") -> None:
    """Prints text that may quote an answer, a peer or a file, without markup and with control characters escaped."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)
