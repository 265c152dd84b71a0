"""Progress of running nodes from their events; for a simulation as a live table, or as one plain line per interval.

Invariant: only reads events, and redraws at most four times a second, so that showing slows no run noticeably.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm.events import (
    EarlierRefusals,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    NodeFinished,
    NodeKilled,
    NodeRestarted,
    NodeStarted,
    NodeStopped,
    PolicyEvaluated,
    StepMade,
    WorkerDied,
    groups_learned_from,
    kind_of,
)
from swarm.telemetry.time_left import LONG_S, TimeLeft, duration_words
from swarm.trained.learning_evidence import EvidenceTally
from swarm.types import NodeId

PLAIN_EVERY_S = 9.0
SHORTER = "--rounds N makes fewer steps, --preset tiny a small model in minutes"
_RATE_WINDOW_S = 30.0
WORKING = ("starting", "ready", "learning")  # states in which the worker's own words say more


@dataclass
class NodeProgress:
    """Progress of one node according to its events so far."""

    curriculum: tuple[str, ...] = ()
    state: str = "starting"
    step: int = 0
    ages: list[int] = field(default_factory=list[int])  # of the newest draw
    reward: float | None = None
    ess_share: float | None = None
    puts: list[tuple[float, int, float]] = field(default_factory=list[tuple[float, int, float]])  # at_s, tokens, reward
    accuracy: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    learning: EvidenceTally = field(default_factory=EvidenceTally)
    refusals: Counter[str] = field(default_factory=Counter[str])
    brought: Counter[NodeId] = field(default_factory=Counter[NodeId])  # groups admitted, by producer
    drawn: Counter[NodeId] = field(default_factory=Counter[NodeId])  # groups, by producer
    _draw: GroupsDrawn | None = None  # the newest
    _learned: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])  # draw -> groups by origin
    _total: Counter[str] = field(default_factory=Counter[str])  # of all draws

    def update(self, event: Event) -> None:
        """Applies one event of the node."""
        match event:
            case StepMade():
                self.state, self.step = "learning", event.step
                if self._draw is not None and self._draw.draw_step == event.draw_step:
                    self._count(event.draw_step, groups_learned_from(self._draw, event))
                self.reward = event.diagnostics.get("reward_mean", self.reward)
                self.ess_share = event.diagnostics.get("ess_share", self.ess_share)
                self.ages = list(event.ages_steps)
            case PolicyEvaluated():
                self.accuracy[(event.env, event.split)] = event.accuracy
                self.learning.add(event)
            case GroupPut():
                self.puts.append((event.at_s, event.num_tokens, event.reward_mean))
                self.puts = [put for put in self.puts if put[0] > event.at_s - _RATE_WINDOW_S]
            case GroupAdmitted():
                self.brought[event.producer] += 1
            case GroupsDrawn():
                self.drawn.update(group.producer for group in event.groups)
                self._draw = event
                self._count(event.draw_step, event.groups)
            case GroupRefused():
                self.refusals[event.reason] += event.count
            case EarlierRefusals():
                self.refusals = Counter(event.refused)
            case NodeKilled() | NodeStopped() | NodeRestarted() | NodeFinished() | WorkerDied():
                self.state = kind_of(event).replace("_", " ")
            case NodeStarted():
                self.state = "ready"
            case _:
                pass

    @property
    def age(self) -> float | None:
        """Mean age of the newest step, in steps."""
        return fmean(self.ages) if self.ages else None

    @property
    def num_local(self) -> int:
        """Groups of the own policy learned from; a draw that is made again after a restart counts once."""
        return self._total["local"] + self._total["follower"]

    @property
    def num_external(self) -> int:
        """Groups of other policies learned from, counted as in `num_local`."""
        return self._total["external"]

    def _count(self, draw_step: int, learned_from: Iterable[GroupUse]) -> None:
        self._total.subtract(self._learned.get(draw_step, {}))  # it may be made again, or a part of it not learned from
        self._learned[draw_step] = counts = Counter(use.origin for use in learned_from)
        self._total.update(counts)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second in the 30 s before the newest group; None with fewer than two groups there."""
        if len(self.puts) < 2 or self.puts[-1][0] <= self.puts[0][0]:
            return None
        return sum(tokens for _, tokens, _ in self.puts[1:]) / (self.puts[-1][0] - self.puts[0][0])

    @property
    def made_reward(self) -> float | None:
        """Mean reward of the groups made in the 30 s before the newest one; None without a group."""
        return fmean(reward for *_, reward in self.puts) if self.puts else None

    def mean_accuracy(self, own: bool) -> float | None:
        """Newest accuracy on all problems, mean over the environments in the curriculum (`own`) or not in it.

        None if none of them was evaluated.
        """
        values = [a for (env, split), a in self.accuracy.items() if split == "all" and (env in self.curriculum) == own]
        return fmean(values) if values else None


class LiveProgress:
    """Shows every node of a running simulation.

    Example:
        with LiveProgress(console, "title", {"ada": ("sums",)}, num_steps=30) as live:
            live.watch("ada", event)
    """

    def __init__(
        self,
        console: Console,
        title: str,
        curricula: dict[str, tuple[str, ...]],
        num_steps: int = 0,
        monotonic_s: Callable[[], float] = time.monotonic,
        times: Mapping[str, TimeLeft] | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepares the display; the `with` shows it.

        Args:
            console: console to draw on.
            title: first line.
            curricula: environments of each node, by name.
            num_steps: steps of each node; 0 if unknown.
            monotonic_s: clock of the display.
            times: estimate of the time left for each node that trains, by name; None: no estimate.
            now_s: wall clock.
        """
        self._console = console
        self._title = title
        self._rows = {name: NodeProgress(curriculum=environments) for name, environments in curricula.items()}
        self._num_steps = num_steps
        self._times, self._now_s = times or {}, now_s
        self._activities: Mapping[str, str] = {}
        self._is_foretold = False
        self._monotonic_s = monotonic_s
        self._began_s = self._plain_at_s = monotonic_s()
        self._live = Live(self.table(), console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "LiveProgress":
        if self._live is not None:
            self._live.start()
        else:
            self._console.print(self._title, markup=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self.table())
            self._live.stop()
        else:
            self._print_line()

    def watch(self, name: str, event: Event) -> None:
        """Applies one event of a node; an unknown name, such as `coordinator`, gets its own row."""
        if name not in self._rows:
            self._rows[name] = NodeProgress(curriculum=())
        self._rows[name].update(event)
        if name in self._times:
            self._times[name].see(event)
        self.tick()

    def tick(self, activities: Mapping[str, str] | None = None) -> None:
        """Refreshes the display between events. `activities`: present work of each node; None: as before."""
        self._activities = self._activities if activities is None else activities
        if not self._is_foretold and (left_s := self.left_s()) is not None:
            self._is_foretold = True
            shorter = f" ({SHORTER})" if left_s > LONG_S else ""
            line = f"about {duration_words(left_s)} from here, by the speed of the first evaluation{shorter}"
            self._console.print(line, markup=False, soft_wrap=True, highlight=False)
        if self._live is not None:
            self._live.update(self.table())
        elif self._monotonic_s() - self._plain_at_s >= PLAIN_EVERY_S:
            self._plain_at_s = self._monotonic_s()
            self._print_line()

    def left_s(self) -> float | None:
        """Estimated seconds until every node has made its steps; None if no estimate is known.

        With more nodes than cores, a slow node becomes faster as others end: the estimate is the mean over the nodes
        that still work. Otherwise it is that of the slowest node.
        """
        left = [of_node.seconds(self._now_s()) for of_node in self._times.values()]
        known = [seconds for seconds in left if seconds is not None]
        working = [seconds for seconds in known if seconds] or known
        if not working:
            return None
        return fmean(working) if len(self._times) > (os.cpu_count() or 1) else max(working)

    def table(self) -> Table:
        """Table with a row for each node at this moment."""
        table = Table(title=Text(f"{self._title}  {self._elapsed()}"), title_justify="left")
        for name in ("node", "state", "step"):
            table.add_column(name)
        for name in ("age", "local/ext", "reward", "own", "other", "tok/s", "ESS", "refused"):
            table.add_column(name, justify="right")
        for name, row in self._rows.items():
            table.add_row(*(Text(cell) for cell in self._cells(name, row)))
        return table

    def _cells(self, name: str, row: NodeProgress) -> Sequence[str]:
        of = f"/{self._num_steps}" if self._num_steps else ""
        return (
            name,
            self._doing(name, row).strip(" ()").partition(",")[0] or row.state,
            f"{row.step}{of}",
            figure(row.age, 1),
            f"{row.num_local}/{row.num_external}",
            figure(row.reward),
            figure(row.mean_accuracy(own=True)),
            figure(row.mean_accuracy(own=False)),
            figure(row.tokens_per_s, 0),
            figure(row.ess_share),
            str(row.refusals.total()),
        )

    def _doing(self, name: str, row: NodeProgress) -> str:
        """Present work of a node in brackets; empty if the node has ended, or its work is not known."""
        works = row.state in WORKING and name in self._activities
        return f" ({self._activities[name]})" if works else ""

    def _print_line(self) -> None:
        of = f" of {self._num_steps}" if self._num_steps else ""
        parts = [
            f"{name} step {row.step}{of}{self._doing(name, row)}"
            f" age {figure(row.age, 1)} local/ext {row.num_local}/{row.num_external} reward {figure(row.reward)}"
            f" own {figure(row.mean_accuracy(own=True))} other {figure(row.mean_accuracy(own=False))}"
            f" ESS {figure(row.ess_share)} {figure(row.tokens_per_s, 0)} tok/s"
            for name, row in self._rows.items()
        ]
        self._console.print(f"{self._elapsed()}  " + " | ".join(parts), markup=False, soft_wrap=True, highlight=False)

    def _elapsed(self) -> str:
        seconds = int(self._monotonic_s() - self._began_s)
        left_s = self.left_s()
        left = "" if left_s is None else f", about {duration_words(left_s)} left"
        return f"{seconds // 60}:{seconds % 60:02d}{left}"


def figure(value: float | None, digits: int = 2) -> str:
    """A number with fixed digits, without the zero before the point (`.71`); a dash for None or NaN."""
    if value is None or math.isnan(value):
        return "-"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) and digits else text
