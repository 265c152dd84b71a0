"""Worker: the parts that trainer and generator loops share.

Invariant: every part is behind a protocol or a plain function; blocking ones say so.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.activity import OnProgress, ignore_progress
from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.episode import Actions
from swarm.interfaces import Generator, Learner, LocalExchange, Offload, Tokenizer
from swarm.loops.overlap import Overlap
from swarm.telemetry.shown_episodes import ShownEpisode
from swarm.types import Draw, PolicyVersion, RolloutGroup, Task
from swarm.weights.apply import Applier

Encode = Callable[[PolicyVersion, object], list[bytes]]  # blocking; version and its tensors to manifest bodies
Produce = Callable[[int, int], list[RolloutGroup]]  # blocking; number of the first question, how many
Ask = Callable[[int, int], Awaitable[list[RolloutGroup]]]  # the same, choosing the questions
Evaluate = Callable[[Sequence[Task]], list[list[Actions]]]  # blocking; tries of the newest version at each task
Greedy = Callable[[Draw], list[Actions]]  # blocking; greedy actions of the newest version for each group's task
KeepBest = Callable[[PolicyVersion, Any, float], object]  # blocking; version, its tensors, success on held-out ones
Show = Callable[[Sequence[ShownEpisode]], None]  # blocking; keeps episodes of an evaluation for people


@dataclass(kw_only=True)
class Worker:
    """What trains and generates on a node, behind protocols."""

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
    applier: Applier | None = None  # where another node's versions are followed
    on_progress: OnProgress = ignore_progress
    show: Show = lambda episodes: None
    keep_best: KeepBest | None = None  # where the best version is kept for taking it out
    close: Callable[[], None] = lambda: None  # ends what the engine started
    saves_when_stopped: bool = False  # a cancelled learner ends its step and saves; False: all ends as by a kill
    saved_step: int = 0  # of the newest checkpoint
    checkpoint_pause_s: float = 0.0  # between two checkpoints, at least
    may_save_at_s: float = -math.inf  # monotonic; none is due before
    save_again_at_s: float = math.inf  # monotonic; a checkpoint that the disk did not take is written then
    cut_off: tuple[int, int] = (-1, 0)  # number of the question whose answers were cut off last, how often in a row
    overlap: Overlap = field(init=False)

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.clock)
