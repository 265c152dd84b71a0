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

from node.status import activity_words, learning_lines, node_name, problems, read_status
from swarm.diagnosis.process_rules import paused_words
from swarm.errors import ConfigError, SwarmError
from swarm.printable import as_argument, one_line
from swarm.process import is_running
from swarm.report.live import WORKING, NodeProgress, figure
from swarm.report.node_directory import EVENTS, MAX_IDLE_S
from swarm.telemetry import EventTail
from swarm.trained.learning_evidence import LearningEvidence
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
    def learning(self) -> LearningEvidence:
        """Evidence of learning so far."""
        return self.progress.learning.evidence

    @property
    def learned(self) -> list[str]:
        """The same in lines, with the name of the node; empty for a node without a learner, or not started yet."""
        return [f"{self.name}: {one_line(line)}" for line in learning_lines(self.status, self.learning)]


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
        _print_plain(nodes, console, wait, now_s)
        return
    with Live(view(nodes), console=console, auto_refresh=False) as live:
        while wait(POLL_S):
            changes = [node.refresh(now_s()) for node in nodes]
            if any(changes):
                live.update(view(nodes), refresh=True)


def _print_plain(
    nodes: Sequence[WatchedNode], console: Console, wait: Callable[[float], bool], now_s: Callable[[], float]
) -> None:
    """Prints a line after each wait, and before it the evidence of learning where that has changed."""
    shown = list[str]()
    while True:
        learned = [line for node in nodes for line in node.learned]
        for line in (*(each for each in learned if each not in shown), " | ".join(map(_plain, nodes))):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if not wait(LINE_EVERY_S):
            return
        shown = learned
        for node in nodes:
            node.refresh(now_s())


def _plain(node: WatchedNode) -> str:
    progress, whole = node.progress, node.learning.whole
    held_out = "-" if whole is None else f"{figure(whole.after)} (step {whole.newest_step})"
    problem = f" problem: {one_line(node.problems[0])}" if node.problems else ""
    return (
        f"{node.name} {node.state} step {node.step} reward {figure(node.reward)} held out {held_out} "
        f"age {figure(node.progress.age, 1)} {figure(node.tokens_per_s, 0)} tok/s own/others "
        f"{progress.num_local}/{progress.num_external} refused {progress.refusals.total()}{problem}"
    )


def view(nodes: Sequence[WatchedNode]) -> RenderableType:
    """Evidence of learning, a table with a row for each node, and notes: producers, refusals, problems."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("node", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "reward", "held out", "age", "ESS", "tok/s", "own/others", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    names = {str(node.status.get("node_id")): node.name for node in nodes}
    for node in nodes:
        progress, whole = node.progress, node.learning.whole
        table.add_row(
            Text(node.name),
            Text(node.state, style="" if node.is_running else "dim"),
            str(node.step),
            figure(node.reward),
            figure(None if whole is None else whole.after),
            figure(node.progress.age, 1),
            figure(progress.ess_share),
            figure(node.tokens_per_s, 0),
            f"{progress.num_local}/{progress.num_external}",
            str(progress.refusals.total()),
        )
    learned = [Text(line) for node in nodes for line in node.learned]
    return Group(*learned, table, *(line for node in nodes for line in _notes(node, names)))


def _notes(node: WatchedNode, names: dict[NodeId, str]) -> list[Text]:
    progress, notes = node.progress, list[Text]()

    def note(what: str, words: str) -> None:
        if words:
            notes.append(Text.assemble((f"{node.name} {what}: ", "dim"), words))

    if node.is_running and node.status.get("paused_since_s") is not None:
        note("paused", f"{paused_words(node.status['paused_since_s'])}; swarm resume {as_argument(node.path)} goes on")
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
    parts = [
        f"{one_line(name)} {count:,} ({count / (total or 1):.0%})" for name, count in counts.most_common(MAX_NAMED)
    ]
    further = len(counts) - len(parts)
    return ", ".join(parts) + (f", {further} more" if further > 0 else "")
