"""Step loop: one thread that owns an engine, names the version of each token, and changes weights between two steps.

A row (`PendingSequence`) is WAITING (no job in the engine), RUNNING (`name` is its job's) or ENDED (reported once).
A change of weights is a transaction; `in_flight` decides when it begins:

    in flight:   at once, between two steps
    otherwise:   after the running rows have ended; waiting ones are held back

    caller            loop                                     engine
      | load(v2) ------>| RELOAD: replace the weights ---------->| fails -> reload(last good) -> WeightsRefused
      |                 | RESTART rows that have no token yet -->| drop, add with a new salt: nothing of v1 is cached
      |                 | SCORE the canaries ------------------->| step, step, ...: running rows go on, made by v2
      |                 |   within tolerance
      |<- LoadReport ---| COMMIT: v2 is served; report the rows that ended since
      |                 |   beyond it
      |                 | ROLL BACK: reload(last good), --------->|
      |                 |   cut every row to its tokens before, restart all of them with another salt
      |<- WeightsRefused|

Invariant: a token that left this module was made by the weights that its span names.
"""

import itertools
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np

from swarm.errors import WeightsRefused
from swarm.generation.canaries import mismatch_nats
from swarm.generation.vllm_messages import NewWeights
from swarm.types import FinishReason, FloatArray, LoadReport, PolicyVersion, Sampling, VersionSpan

logger = logging.getLogger(__name__)


class Mode(StrEnum):
    """The purpose of a sequence."""

    SAMPLE = "sample"
    GREEDY = "greedy"
    SCORE = "score"  # gives the log-probs of its prompt, and no tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an engine for one sequence."""

    token_ids: Sequence[int]  # of the prompt, and those made before
    mode: Mode
    sampling: Sampling
    max_new_tokens: int
    seed: int
    salt: str  # jobs with different salts share no cached prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The result of one step for one sequence."""

    name: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()  # at the sampling temperature
    finish: FinishReason | None = None  # None while the sequence goes on
    scores: FloatArray | None = None  # [T] of the prompt, the first NaN; with the end of a SCORE job


class StepEngine(Protocol):
    """An engine that makes at most one token of each sequence in a step; every call comes from one thread."""

    def add(self, name: str, job: Job) -> None:
        """Schedules a sequence; later calls of `step` report its progress under `name`."""
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Aborts sequences in progress; later steps do not report them."""
        ...

    def step(self) -> list[Progress]:
        """Makes one step of the scheduled sequences; returns their progress, with `finish` where a sequence ends."""
        ...

    def reload(self, path: Path | None) -> None:
        """Loads the weights from a safetensors file; if `path` is None, restores the engine's initial weights."""
        ...


@dataclass(eq=False, slots=True)
class PendingSequence:
    """One sequence to generate or score: waiting, running or ended."""

    prompt: Sequence[int]
    mode: Mode
    sampling: Sampling
    seed: int
    ended: Callable[["PendingSequence"], None]  # called once, from the loop's thread
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    finish: FinishReason = FinishReason.ABORTED  # until it ends
    scores: FloatArray | None = None
    name: str = ""  # of its job; empty where the engine has none

    def extend(self, progress: Progress, version: PolicyVersion) -> None:
        """Adds the result of a step by the weights of `version`."""
        if progress.token_ids and (not self.spans or self.spans[-1].version != version):
            self.spans.append(VersionSpan(start=len(self.tokens), version=version))
        self.tokens += progress.token_ids
        self.logprobs += progress.logprobs
        self.scores = progress.scores
        if progress.finish is not None:
            self.end(progress.finish, version)

    def end(self, finish: FinishReason, version: PolicyVersion) -> None:
        """Ends the sequence; a sequence without tokens is attributed to `version`."""
        self.finish = finish
        self.spans = self.spans or [VersionSpan(start=0, version=version)]

    def truncate(self, num_tokens: int) -> None:
        """Removes the tokens after the first `num_tokens`, so that the sequence can go on from there."""
        del self.tokens[num_tokens:], self.logprobs[num_tokens:]
        self.spans = [span for span in self.spans if span.start < num_tokens]
        self.finish, self.scores = FinishReason.ABORTED, None

    def scored(self) -> FloatArray:
        """[T] log-probs of the prompt; all NaN if the engine gave none."""
        return np.full(len(self.prompt), np.nan, np.float32) if self.scores is None else self.scores


class EngineLoop:
    """Runs an engine in the calling thread (`run`); the other methods may be called from any thread.

    Args:
        engine: engine with the weights of `version`.
        version: version that the engine was started with.
        stepped: called with the number of tokens that each step made.

    Example:
        threading.Thread(target=loop.run).start()
        report = loop.load(NewWeights(...)).result()
    """

    def __init__(
        self, engine: StepEngine, version: PolicyVersion, stepped: Callable[[int], None] = lambda num_tokens: None
    ) -> None:
        self._engine = engine
        self._stepped = stepped
        self._version = version
        self._good: Path | None = None  # file with the weights of `version`; None: those of the start
        self._numbers = itertools.count()
        self._epoch = next(self._numbers)  # of the weights in the engine: a new number whenever they are replaced
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[PendingSequence] = deque()
        self._running: dict[str, PendingSequence] = {}  # by name of the job
        self._changes: deque[tuple[NewWeights, Future[LoadReport]]] = deque()

    @property
    def version(self) -> PolicyVersion:
        """The version that is served."""
        return self._version

    def submit(self, rows: Sequence[PendingSequence]) -> None:
        """Schedules sequences; calls `ended` of each sequence when it ends, in the thread of `run`."""
        self._inbox.put(lambda: self._waiting.extend(rows))

    def cancel(self) -> None:
        """Ends every sequence with the tokens that it has; sequences in mode SCORE go on."""
        self._inbox.put(self._cancel)

    def load(self, new: NewWeights) -> "Future[LoadReport]":
        """Requests new weights, at once if `in_flight`, else after the running rows. May end in WeightsRefused."""
        done = Future[LoadReport]()
        self._inbox.put(lambda: self._changes.append((new, done)))
        return done

    def stop(self) -> None:
        """Ends `run` before its next step; unfinished work is dropped."""
        self._inbox.put(None)

    def run(self) -> None:
        """Steps the engine until `stop`. Raises any error of the engine, which cannot be used after that."""
        while self._read_inbox():
            if self._changes and (self._changes[0][0].in_flight or not self._running):
                self._change_weights(*self._changes.popleft())
            elif self._running:
                _report_ended(self._step())

    def _read_inbox(self) -> bool:
        """Handles all queued requests, and waits for a request if there is no work; returns False at `stop`."""
        while True:
            is_idle = not (self._running or self._waiting or self._changes)
            try:
                message = self._inbox.get(block=is_idle)
            except queue.Empty:
                break
            if message is None:
                return False
            message()
        if all(new.in_flight for new, _ in self._changes):  # else the running rows are to end first
            while self._waiting:
                self._begin(self._waiting.popleft())
        return True

    def _begin(self, row: PendingSequence) -> None:
        """Schedules a sequence in the engine, from the tokens that it has so far."""
        row.name = str(next(self._numbers))
        made = len(row.tokens)
        job = Job(
            token_ids=[*row.prompt, *row.tokens],
            mode=row.mode,
            sampling=row.sampling,
            max_new_tokens=row.sampling.max_new_tokens - made,
            seed=row.seed + made,
            salt=str(self._epoch),
        )
        self._engine.add(row.name, job)
        self._running[row.name] = row

    def _step(self) -> list[PendingSequence]:
        """Makes one step and returns the sequences that it ended."""
        ended: list[PendingSequence] = []
        made = self._engine.step()
        self._stepped(sum(len(progress.token_ids) for progress in made))
        for progress in made:
            row = self._running.get(progress.name)
            if row is None:
                continue
            row.extend(progress, self._version)
            if progress.finish is not None:
                del self._running[progress.name]
                row.name = ""
                ended.append(row)
        return ended

    def _drop(self, rows: Sequence[PendingSequence]) -> None:
        waiting = set(map(id, rows))
        self._waiting = deque(row for row in self._waiting if id(row) not in waiting)
        names = [row.name for row in rows if self._running.pop(row.name, None) is not None]
        for row in rows:
            row.name = ""
        self._engine.drop(names)

    def _cancel(self) -> None:
        rows = [row for row in (*self._running.values(), *self._waiting) if row.mode is not Mode.SCORE]
        self._drop(rows)
        for row in rows:
            row.end(FinishReason.ABORTED, self._version)
        _report_ended(rows)

    # --- changes of weights --------------------------------------------------------------------

    def _change_weights(self, new: NewWeights, done: "Future[LoadReport]") -> None:
        """RELOAD, RESTART, SCORE, then COMMIT or ROLL BACK; only then are rows reported that ended in between."""
        began_s, before = time.monotonic(), self._version
        marks = [(row, len(row.tokens)) for row in self._running.values()]
        try:
            self._engine.reload(new.path)
        except Exception as error:  # whatever an engine raises half-way, its weights must be restored
            logger.exception("weights could not be loaded", extra={"step": new.version.step})
            self._engine.reload(self._good)
            done.set_exception(WeightsRefused(f"step {new.version.step}: the engine failed to load: {error}"))
            return
        self._version, self._epoch = new.version, next(self._numbers)
        swapped_s = time.monotonic()
        # The old weights have read prompts of sequences without a token, at least in part: these are read again.
        self._restart([row for row, num_tokens in marks if num_tokens == 0])
        ended: list[PendingSequence] = []
        mismatch = mismatch_nats(new.canaries, lambda sequences: self._score(sequences, ended))
        if mismatch <= new.tolerance_nats:
            self._good = new.path
            pause_s = (swapped_s if marks else time.monotonic()) - began_s
            done.set_result(LoadReport(pause_s=pause_s, mismatch_nats=mismatch))
            _report_ended(ended)
            return
        self._engine.reload(self._good)
        self._version = before
        self._epoch = next(self._numbers)  # the last step may have cached a block of new weights under the old epoch
        for row, num_tokens in marks:
            row.truncate(num_tokens)
        self._restart([row for row, _ in marks])
        done.set_exception(
            WeightsRefused(
                f"step {new.version.step}: canary log-probs differ by {mismatch:.3g} nats on average, more than the "
                f"tolerance {new.tolerance_nats:.3g}"
            )
        )

    def _restart(self, rows: Sequence[PendingSequence]) -> None:
        """Has the engine read sequences again, with the tokens that they have, without entries cached earlier."""
        self._drop(rows)
        for row in rows:
            self._begin(row)

    def _score(self, sequences: Sequence[Sequence[int]], ended: list[PendingSequence]) -> list[FloatArray]:
        """Log-probs by the current weights; other sequences go on, and are added to `ended` when they end."""
        rows = [sequence_to_score(sequence, lambda row: None) for sequence in sequences]
        for row in rows:
            if row.scores is None:
                self._begin(row)
        while any(row.name for row in rows):
            ended += [row for row in self._step() if row not in rows]
        return [row.scored() for row in rows]


def sequence_to_score(sequence: Sequence[int], ended: Callable[[PendingSequence], None]) -> PendingSequence:
    """Pending sequence in mode SCORE; a sequence of fewer than two tokens gets its scores, NaN, at once."""
    row = PendingSequence(sequence, Mode.SCORE, Sampling(max_new_tokens=1), 0, ended)
    if len(sequence) < 2:
        row.scores = np.full(len(sequence), np.nan, np.float32)
    return row


def _report_ended(rows: Sequence[PendingSequence]) -> None:
    for row in rows:
        row.ended(row)
