"""The commands that show the work of nodes: report, watch, trace."""

import json
import secrets
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from swarm.cli.shared_options import Trust
from swarm.command_line import waiting
from swarm.errors import ConfigError
from swarm.printable import printable


def report(
    dirs: Annotated[list[Path] | None, Argument(help="Directories of nodes, running or not.")] = None,
    out: Annotated[Path | None, Option(help="File to write; without, report.html in the first directory.")] = None,
    samples: Annotated[int, Option(min=0, max=100, help="Newest groups of each node to show.")] = 6,
    trust: Trust = False,
    compare: Annotated[
        list[Path] | None,
        Option(help="Directory of the control, such as the node of the same name without sharing. Repeatable."),
    ] = None,
) -> None:
    """Write one HTML page about one or more nodes: if they learned, curves, contributions, samples, invariants.

      swarm report swarm-train
      swarm report runs/X/swarm/ada runs/X/swarm/bell --out both.html
      swarm report with-recipe --compare without

    The page needs no network and no other file.
    """
    from swarm.report.html import render_html
    from swarm.report.node_directory import NodeReports

    paths = dirs or [Path("swarm-node")]
    if shared := {path.resolve() for path in paths} & {path.resolve() for path in compare or []}:
        raise ConfigError(f"--compare {', '.join(map(str, shared))}: the same directory is reported; name another run")
    with waiting(f"reading {', '.join(map(str, paths))}"):
        result = NodeReports(paths, trust).read(samples)
    if compare:
        result = replace(result, rival=NodeReports(compare, trust).read().swarm, rival_kind="control")
    out = out or paths[0] / "report.html"
    try:
        out.write_text(render_html(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}; name another file") from None
    for node in result.swarm.nodes:
        for line in node.learning.lines if node.trains else ():
            _say(f"{node.name}: {line}")
        _say(f"{node.name}: {node.state}")
        for problem in node.problems:
            _say(f"  problem: {problem}")
    for verdict in result.invariants:
        if not verdict.holds:
            _say(f"violated: {verdict.name} ({verdict.detail})")
    typer.echo(f"report: {out}")


def watch(
    dirs: Annotated[list[Path] | None, Argument(help="Directories of nodes; they may start later.")] = None,
    once: Annotated[bool, Option("--once", help="Show the present state, and end.")] = False,
    web: Annotated[bool, Option("--web", help="Serve live pages: curves, samples, causes, tokens.")] = False,
    listen: Annotated[str, Option(help="host:port of --web, plain HTTP.")] = "127.0.0.1:8400",
    trust: Trust = False,
) -> None:
    """Watch nodes while they run: step, reward, held-out success, ages, speed, contributions, refusals, problems.

      swarm watch swarm-train
      swarm watch --web runs/X/swarm/ada runs/X/swarm/bell

    Ctrl-C ends it; the nodes go on. Where the output is no terminal, a line is printed each second.
    """
    from swarm.report.watch import WatchedNode, watch_nodes

    paths = dirs or [Path("swarm-node")]
    if once and not any(path.is_dir() for path in paths):
        raise ConfigError(f"{paths[0]}: no such directory; `swarm watch DIR` without --once waits for one")
    if web and once:
        raise ConfigError("--web with --once: a page goes on; `swarm report DIR` writes one of the present state")
    if web:
        _watch_in_browser(paths, listen, trust)
        return
    nodes = [WatchedNode(path) for path in paths]

    def wait(seconds: float) -> bool:
        if once:
            return False
        time.sleep(seconds)
        return True

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal gets its cursor back
    with suppress(KeyboardInterrupt):
        watch_nodes(nodes, Console(), wait)


def _watch_in_browser(paths: list[Path], listen: str, is_trusted: bool) -> None:
    from swarm.report.web_pages import WebPages
    from swarm.telemetry.page_server import PageServer

    key = secrets.token_urlsafe(18)
    host, _, port = listen.rpartition(":")
    server = PageServer(WebPages(paths, key, is_trusted=is_trusted).page_of)
    try:
        bound = server.start(host, int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--listen {listen}: cannot listen there: {error}; name another host:port") from None
    typer.echo(f"http://{host}:{bound}/{key}/")
    typer.echo("whoever has this address reads what these nodes made; Ctrl-C ends it, the nodes go on", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    server.stop()


def trace(
    digest: Annotated[str, Argument(help="Digest of a group, or its first hexadecimal digits, at least 4.")],
    dirs: Annotated[list[Path] | None, Argument(help="Directories of nodes, running or not.")] = None,
    as_json: Annotated[bool, Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Follow one group through every node that saw it: made, admitted or refused, drawn, learned from.

    Only event logs and stores are read; what they cannot show is listed. Times are those of each node's own clock.
    """
    from swarm.report.group_trace import trace_group
    from swarm.report.node_directory import open_directories

    found = trace_group(open_directories(dirs or [Path("swarm-node")]), digest)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    width = max((len(line.node) for line in found.lines), default=0)
    _say(f"group {found.digest}: {found.env}, made by {found.producer} with the policy of {found.policy}")
    for line in found.lines:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.at_s)) + f".{int(line.at_s % 1 * 10)}"
        _say(f"{at}  {line.node:<{width}}  {line.text}")
    for unknown in found.unknown:
        _say(f"not known: {unknown}")


def _say(text: str) -> None:
    """Prints text that may hold names and reasons from other machines, with control characters escaped."""
    typer.echo(printable(text))
