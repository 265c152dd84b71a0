"""Processes of a local swarm: start, watch, kill, restart and stop them, and end a silent simulation.

Invariant: no process outlives the simulation; each has its own session and is killed with its group. A sign of life is
work that advanced: an event, an activity of its worker, or, before the first of these, used CPU. Status files and
heartbeats are no signs of life, since a process with a stuck worker still writes them.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm.activity import WAITING, Activity
from swarm.errors import SwarmError
from swarm.events import (
    Event,
    GroupPut,
    GroupsDrawn,
    GroupUnscored,
    NodeFinished,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    VersionPublished,
    kind_of,
)
from swarm.process import comes, cpu_s, work_of
from swarm.simulate.local.fork_server import Forked, ForkServer, environment
from swarm.telemetry import EventTail
from swarm.types import JsonDict

OF_WORK = (NodeStarted, GroupPut, GroupUnscored, GroupsDrawn, StepMade, PolicyEvaluated, VersionPublished, NodeFinished)
POLL_S = 0.1  # between two reads of files of other processes
# The longest between two signs of life of two SmolLM2 workers, in float32 on two AVX2 cores, was 37 s beside 4 busy
# processes: the prefill of 57 prompts at once (13 s: a micro-batch). bfloat16 without hardware takes 6 times as long.
SILENCE_S = 600.0


class SimulationFailed(SwarmError, RuntimeError):
    """Failure of a simulation: a process did not start, fell silent, cannot make a step, or died unasked."""


_ENDED = (ProcessLookupError, PermissionError)  # PermissionError: macOS, if all of the group are zombies


class Process:
    """One process of the simulation, with its log file and events."""

    def __init__(self, name: str, directory: Path, fork_server: ForkServer | None = None) -> None:
        self.name = name
        self._fork_server = fork_server
        self.directory = directory
        self.events: list[Event] = []
        self.num_starts = 0
        self.is_expected_dead = False
        self._arguments: list[str] = []
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._tail = EventTail(directory / "events.jsonl")

    async def start(self, arguments: Sequence[str] = ()) -> None:
        """Starts `python -m <arguments>` (empty: the last ones); output goes to `<dir>/log.txt`. Raises Unavailable."""
        self._arguments = [*arguments] or self._arguments
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "log.txt"
        if self._fork_server is not None:
            self._process = await self._fork_server.fork(self._arguments, environment(), path)
        else:
            command = [sys.executable, "-m", *self._arguments]
            with path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdout=log, stderr=log, env=environment(), start_new_session=True
                )
        self.num_starts += 1
        self.is_expected_dead = False

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def check(self) -> None:
        """Raises SimulationFailed with the log's end if the process died unasked, Unavailable if the server did."""
        if self._process is not None and self._process.returncode is not None and not self.is_expected_dead:
            if self._fork_server is not None:
                self._fork_server.check()
            raise SimulationFailed(
                f"{self.name} ended with exit code {self._process.returncode}; end of its log:\n{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """The last 3000 characters of the log."""
        return (self.directory / "log.txt").read_text(errors="replace")[-3000:]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its group."""
        if number == signal.SIGKILL:
            self.is_expected_dead = True
        if self.is_alive and self._process is not None:
            with contextlib.suppress(*_ENDED):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """Ends the process with SIGTERM, also if SIGSTOP holds it, then kills what is left of its group."""
        self.is_expected_dead = True
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(*_ENDED):
                self._process.terminate()
                os.killpg(self._process.pid, signal.SIGCONT)  # a process that SIGSTOP holds cannot end
        try:
            await comes(self._process.wait(), partial(work_of, self._process.pid))
        finally:  # also where this wait is cancelled
            with contextlib.suppress(*_ENDED):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def read_events(self) -> list[Event]:
        """The events written since the last call; also appends them to `events`."""
        new = self._tail.read()
        self.events.extend(new)
        return new

    def sign_of_life(self) -> tuple[object, str]:
        """Returns a value that changes while the process advances, and a description of the newest change. Blocking."""
        activity = Activity.read(self.status().get("worker"))
        of_work = [event for event in self.events if isinstance(event, OF_WORK)]
        if activity is not None:
            return (len(of_work), activity), activity.words()
        if of_work:
            return len(of_work), f"event {kind_of(of_work[-1])}"
        used_s = int(cpu_s(self._process.pid)) if self._process is not None else 0
        return used_s, f"starting, {used_s} s of CPU"

    def status(self) -> JsonDict:
        """The newest status.json; empty if it is missing or cannot be read as JSON."""
        try:
            return json.loads((self.directory / "status.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}


@dataclass(frozen=True, slots=True)
class _LastSign:
    sign: object
    words: str
    seen_s: float  # monotonic


class SilenceWatch:
    """Newest sign of life of each process. Example: `watch.look(process)` now and then, then `watch.check(names)`.

    Args:
        monotonic_s: clock, seconds.
        bound_s: silence after which `check` fails, seconds.
    """

    def __init__(self, monotonic_s: Callable[[], float], bound_s: float = SILENCE_S) -> None:
        self._monotonic_s, self._bound_s = monotonic_s, bound_s
        self._last: dict[str, _LastSign] = {}

    @property
    def last_signs(self) -> dict[str, str]:
        """Process name -> description of its newest sign of life."""
        return {name: last.words for name, last in self._last.items()}

    def look(self, process: Process) -> None:
        """Records the sign of life that a process shows now. Blocking."""
        sign, words = process.sign_of_life()
        last = self._last.get(process.name)
        if last is None or last.sign != sign:
            self._last[process.name] = _LastSign(sign, words, self._monotonic_s())

    def check(self, names: Collection[str]) -> None:
        """Raises SimulationFailed if one process is silent without waiting for another, or if all are silent."""
        now_s = self._monotonic_s()
        last = {name: self._last[name] for name in names if name in self._last}
        silent = {name: each for name, each in last.items() if now_s - each.seen_s >= self._bound_s}
        stuck = {name: each for name, each in silent.items() if not each.words.startswith(WAITING)}
        if not stuck and len(silent) == len(names):
            stuck = silent
        if stuck:
            lines = [
                f"{name} showed no sign of life for {now_s - each.seen_s:.0f} s; its last one: {each.words}"
                for name, each in stuck.items()
            ]
            raise SimulationFailed("\n".join(lines))
