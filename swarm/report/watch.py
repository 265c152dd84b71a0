"""Live view of nodes from their directories: a table on a terminal, a plain line a second elsewhere.

Invariant: only reads; a node that does not run, or has no directory yet, is shown with that state.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.status import activity_words, node_name, problems, read_status
from swarm.diagnosis.process_rules import paused_words
from swarm.errors import ConfigError, SwarmError
from swarm.printable import one_line
from swarm.process import is_running
from swarm.report.live import WORKING, NodeProgress, figure
from swarm.report.node_directory import EVENTS, MAX_IDLE_S
from swarm.telemetry import EventTail
from swarm.types import JsonDict, NodeId, short

POLL_S: Final = 0.5
LINE_EVERY_S: Final = 1.0
MAX_NAMED: Final = 4  # producers and reasons of a line


@dataclass
class WatchedNode:
    """One node according to its directory. Raises ConfigError if the path is a file."""

    path: Path
    progress: NodeProgress = field(default_factory=NodeProgress)
    status: JsonDict = field(default_factory=JsonDict)
    problems: tuple[str, ...] = ()
    is_running: bool = False

    def __post_init__(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; give the directory of a node")
        self._tail = EventTail(self.path / EVENTS)

    def refresh(self, now_s: float) -> bool:
        """Reads new events and the status; returns True if there are new events or the status or state changed."""
        before = (self.status, self.problems, self.is_running)
        num_new = 0
        for event in self._tail.stream():
            self.progress.update(event)
            num_new += 1
        self.is_running = is_running(self.path)
        try:
            self.status = read_status(self.path)
            self.problems = tuple(problems(self.status, now_s, MAX_IDLE_S, self.is_running, self.path))
        except SwarmError:  # it is starting, or was never started
            self.status, self.problems = {}, ()
        return num_new > 0 or before != (self.status, self.problems, self.is_running)

    @property
    def name(self) -> str:
        return one_line(node_name(self.path, self.status))

    @property
    def state(self) -> str:
        """State of the node, or its present work, in a few words."""
        if not self.is_running:
            return "finished" if self.status.get("is_finished") else "does not run" if self.status else "not started"
        if self.status.get("paused_since_s") is not None:
            return "paused"
        works = self.progress.state in WORKING and not self.status.get("is_finished")
        doing = activity_words(self.status) if works else ""
        return doing or (self.progress.state if self.status else "starting")

    @property
    def step(self) -> int:
        return max(self.progress.step, int(self.status.get("step", 0)))

    @property
    def reward(self) -> float | None:
        """Mean reward of the newest step; without a step, that of the newest own groups; None without both."""
        return self.progress.made_reward if self.progress.reward is None else self.progress.reward

    @property
    def tokens_per_s(self) -> float | None:
        """Generation speed over its newest 30 seconds; None if it is unknown, or the node does not run."""
        return self.progress.tokens_per_s if self.is_running else None

    @property
    def held_out(self) -> dict[str, float]:
        """Environment -> newest success on problems that are never trained on."""
        return {env: value for (env, split), value in sorted(self.progress.accuracy.items()) if split == "held_out"}


def watch_nodes(
    nodes: Sequence[WatchedNode],
    console: Console,
    wait: Callable[[float], bool],
    now_s: Callable[[], float] = time.time,
) -> None:
    """Shows the nodes until `wait` returns False: as a live table on a terminal, else as a line after each wait.

    Args:
        nodes: nodes to show.
        console: console to draw on.
        wait: waits for the given seconds; returns False to end.
        now_s: wall clock.
    """
    for node in nodes:
        node.refresh(now_s())
    if not console.is_terminal:
        console.print(" | ".join(map(_plain, nodes)), markup=False, highlight=False, soft_wrap=True)
        while wait(LINE_EVERY_S):
            for node in nodes:
                node.refresh(now_s())
            console.print(" | ".join(map(_plain, nodes)), markup=False, highlight=False, soft_wrap=True)
        return
    with Live(view(nodes), console=console, auto_refresh=False) as live:
        while wait(POLL_S):
            changes = [node.refresh(now_s()) for node in nodes]
            if any(changes):
                live.update(view(nodes), refresh=True)


def _plain(node: WatchedNode) -> str:
    progress = node.progress
    held_out = "".join(f" {one_line(env)} {figure(value)}" for env, value in node.held_out.items())
    at_step = f" (step {progress.evaluated_at_step})" if held_out else ""
    problem = f" problem: {one_line(node.problems[0])}" if node.problems else ""
    return (
        f"{node.name} {node.state} step {node.step} reward {figure(node.reward)} held out{held_out or ' -'}{at_step} "
        f"age {figure(node.progress.age, 1)} {figure(node.tokens_per_s, 0)} tok/s own/others "
        f"{progress.num_local}/{progress.num_external} refused {progress.refusals.total()}{problem}"
    )


def view(nodes: Sequence[WatchedNode]) -> RenderableType:
    """Table with a row for each node, and notes below it: held-out success, producers, refusals, problems."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("node", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "reward", "held out", "age", "ESS", "tok/s", "own/others", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    names = {str(node.status.get("node_id")): node.name for node in nodes}
    for node in nodes:
        progress, held_out = node.progress, node.held_out.values()
        table.add_row(
            Text(node.name),
            Text(node.state, style="" if node.is_running else "dim"),
            str(node.step),
            figure(node.reward),
            figure(sum(held_out) / len(held_out) if held_out else None),
            figure(node.progress.age, 1),
            figure(progress.ess_share),
            figure(node.tokens_per_s, 0),
            f"{progress.num_local}/{progress.num_external}",
            str(progress.refusals.total()),
        )
    return Group(table, *(line for node in nodes for line in _notes(node, names)))


def _notes(node: WatchedNode, names: dict[NodeId, str]) -> list[Text]:
    progress, notes = node.progress, list[Text]()

    def note(what: str, words: str) -> None:
        if words:
            notes.append(Text.assemble((f"{node.name} {what}: ", "dim"), words))

    if node.is_running and node.status.get("paused_since_s") is not None:
        note("paused", f"{paused_words(node.status['paused_since_s'])}; swarm resume {node.path} goes on")
    held_out = ", ".join(f"{one_line(env)} {figure(value)}" for env, value in node.held_out.items())
    note("held out", f"{held_out} at step {progress.evaluated_at_step}" if held_out else "")
    named = {producer: names.get(producer, short(producer)) for producer in (*progress.drawn, *progress.brought)}
    own_id = node.status.get("node_id")
    others = Counter({named[each]: count for each, count in progress.brought.items() if each != own_id})
    note("draws groups of", _most(Counter({named[each]: count for each, count in progress.drawn.items()})))
    note("got groups of", _most(others))
    note("refused", _most(progress.refusals))
    return notes + [Text(f"{node.name}: {one_line(problem)}", style="red") for problem in node.problems]


def _most(counts: Counter[str]) -> str:
    """The commonest names with count and share, and the number of further names."""
    total = counts.total()
    parts = [f"{one_line(name)} {count:,} ({count / total:.0%})" for name, count in counts.most_common(MAX_NAMED)]
    further = len(counts) - len(parts)
    return ", ".join(parts) + (f", {further} more" if further > 0 else "")
