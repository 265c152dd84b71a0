"""The commands `swarm pause` and `swarm resume`.

Invariant: importing this file is cheap.
"""

import time
from pathlib import Path
from typing import Annotated, Final

import typer
from typer import Argument

from swarm.errors import SwarmError
from swarm.printable import as_argument

WAIT_S: Final = 10.0  # for the status of the node

Directory = Annotated[Path, Argument(help="Directory of the node, running or not.")]


def pause(directory: Directory = Path("swarm-node")) -> None:
    """Pause a node: it ends its present batch and step, then generates and learns nothing until `swarm resume`.

    The node keeps its place and its heartbeat in the swarm, and goes on serving its data (limit: --max-upload). It
    takes nothing from others, so nothing is scored. No stored data is lost, and groups that wait do not grow old. A
    pause outlives restarts. Memory stays in use: to free it, too, stop the node (Ctrl-C), and start it later.
    """
    from node.pause import pause as pause_node

    since_s = pause_node(directory, time.time())
    _say_once_taken(
        directory, since_s, f"paused since {_clock(since_s)}; swarm resume {as_argument(directory)} goes on"
    )


def resume(directory: Directory = Path("swarm-node")) -> None:
    """End the pause of a node: the node goes on where it stopped."""
    from node.pause import resume as resume_node

    since_s = resume_node(directory)
    words = "it was not paused" if since_s is None else f"goes on, after a pause since {_clock(since_s)}"
    _say_once_taken(directory, None, words)


def _say_once_taken(directory: Path, since_s: float | None, words: str) -> None:
    """Prints a line when a running node has applied the change, or after WAIT_S, or if the node does not run."""
    from node.status import read_status
    from swarm.process import is_running

    until_s = time.monotonic() + WAIT_S
    while is_running(directory):
        try:
            if read_status(directory).get("paused_since_s") == since_s:
                typer.echo(f"{directory}: {words}")
                return
        except SwarmError:
            pass  # the node is starting, and applies the change first
        if time.monotonic() > until_s:
            typer.echo(f"{directory}: {words}, once the node looks, which starts or hangs now (swarm status)")
            return
        time.sleep(0.2)
    typer.echo(f"{directory}: {words} (the node does not run)")


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
