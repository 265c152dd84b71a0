"""Worker: the parts that trainer and generator loops share, and the timer of generation and learning.

Invariant: every part is behind a protocol or a plain function; blocking ones are marked.
"""

import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from collections.abc import Generator as PythonGenerator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from swarm.activity import OnProgress, ignore_progress
from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.episode import Actions
from swarm.interfaces import Generator, Learner, LocalExchange, Offload, Tokenizer
from swarm.telemetry.shown_episodes import ShownEpisode
from swarm.types import Draw, PolicyVersion, RolloutGroup, Task
from swarm.weights.apply import Applier

Encode = Callable[[PolicyVersion, object], list[bytes]]  # blocking; version and its tensors to manifest bodies
Produce = Callable[[int, int], list[RolloutGroup]]  # blocking; number of the first question, how many
Ask = Callable[[int, int], Awaitable[list[RolloutGroup]]]  # the same, choosing the questions
Evaluate = Callable[[Sequence[Task]], list[list[Actions]]]  # blocking; tries of the newest version at each task
Greedy = Callable[[Draw], list[Actions]]  # blocking; greedy actions of the newest version for each group's task
KeepBest = Callable[[PolicyVersion, Any, float], object]  # blocking; version, its tensors, success on held-out tasks
Pair = tuple[Task, str]  # a question and a right answer to it
Show = Callable[[Sequence[ShownEpisode]], None]  # blocking; keeps episodes of an evaluation for people


class Overlap:
    """Seconds spent generating, learning, and both at once; "both" seconds count under each activity too."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: set[str] = set()
        self._since_s = clock.monotonic_s()
        self.seconds = {"generate": 0.0, "learn": 0.0, "both": 0.0}

    @contextmanager
    def doing(self, what: str) -> PythonGenerator[None]:
        """Counts the time inside as `what` ("generate" or "learn")."""
        self._account()
        self._active.add(what)
        try:
            yield
        finally:
            self._account()
            self._active.discard(what)

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last call, by activity."""
        self._account()
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def _account(self) -> None:
        now_s = self._clock.monotonic_s()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        for what in self._active:
            self.seconds[what] += elapsed_s
        if len(self._active) == 2:
            self.seconds["both"] += elapsed_s


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """Parts of a warm-up: answers to show, tasks to try, and the learner that changes."""

    pairs: Callable[[int, int], Sequence[Pair]]  # blocking; from a number on, so many, none held out
    are_scored: bool  # pairs are tasks of the run, so the verifier says what their answers are worth
    tasks: Sequence[Task]  # to try
    tries: Evaluate  # as the generator answers them
    imitate: Callable[[Sequence[Pair], float, str], float]  # blocking; one update at a rate, reported under a name
    begin_anew: Callable[[], None]  # blocking; the present weights become version 0
    notes: dict[str, Any]  # of the checkpoint


@dataclass(kw_only=True)
class Worker:
    """Dependencies and state that the training and generation loops of one node share.

    A node that only generates has no `learner`.
    """

    config: NodeConfig
    exchange: LocalExchange
    generator: Generator
    produce: Produce
    evaluate: Evaluate
    learner: Learner | None
    tokenizer: Tokenizer
    evaluation_tasks: dict[tuple[str, str], Sequence[Task]]  # (environment, split) -> tasks
    clock: Clock
    offload: Offload
    ask: Ask | None = None  # in place of `produce` where the recipe chooses its questions
    greedy: Greedy | None = None  # where the recipe compares with a greedy answer
    encode: Encode | None = None  # where versions are published for others to follow
    warm_up: WarmUp | None = None  # before step 1
    applier: Applier | None = None  # where another node's versions are followed
    on_progress: OnProgress = ignore_progress
    show: Show = lambda episodes: None
    keep_best: KeepBest | None = None  # keeps the best version for export
    serve_runs: Callable[[], Coroutine[Any, Any, None]] | None = None  # hands over runs of agents
    close: Callable[[], None] = lambda: None  # ends the processes of the engine
    saves_when_stopped: bool = False  # a cancelled learner ends its step and saves; False: it ends as by a kill
    saved_step: int = 0  # of the newest checkpoint
    checkpoint_pause_s: float = 0.0  # between two checkpoints, at least
    may_save_at_s: float = -math.inf  # monotonic; no checkpoint is due before
    save_again_at_s: float = math.inf  # monotonic; a checkpoint that the disk refused is written then
    cut_off: tuple[int, int] = (-1, 0)  # number of the question whose answers were cut off last; times in a row
    overlap: Overlap = field(init=False)

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.clock)
