"""The event log of a node: one JSON object per line, in order, readable while it grows.

Invariant: one system call writes a line, and readers skip a partial last line; a full disk loses events but does not
stop the node; no peer controls the volume: files rotate, and refusals are summed up, counted even after their file is
deleted. A reader that reads at least once in KEPT_OLD_FILES rotations gets every event once, in order.
"""

import json
import logging
import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from swarm.clock import Clock, SystemClock
from swarm.events import EarlierRefusals, Event, GroupRefused, UnknownEvent, from_json, to_json
from swarm.read_files import parse_json
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20  # of one file; KEPT_OLD_FILES more are kept
KEPT_OLD_FILES = 3
MAX_LINE_BYTES = 2**24  # that a reader takes at a time; of a draw of 4,096 groups 1.5 MB
REFUSED_EVERY_S = 30.0  # refusals of one reason and producer after the first are one line in that time
MAX_REFUSED_KINDS = 16  # pairs of reason and producer with a count of their own in that time; others count by reason


class EventLog:
    """Appends events to a file.

    The first refusal of a reason and producer is written at once; later ones are summed up and written every
    REFUSED_EVERY_S as one event with their `count`. A killed process loses those not written yet.

    Example:
        events = EventLog(directory / "events.jsonl")
        events.write(NodeFinished(step=3))
    """

    def __init__(self, path: Path, clock: Clock | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._refused = _PendingRefusals()
        self._file = _open(path)
        self.num_lost = 0  # events that the disk did not take
        _drop_half_a_line(self._file)
        self._size = os.fstat(self._file).st_size
        newest = path if self._size else old_file(path, 1)
        self._totals = _refusals_until(newest)
        if not self._size and newest.exists():  # killed between the two halves of a rotation
            self._append(EarlierRefusals(refused=dict(self._totals)))

    def write(self, event: Event) -> None:
        """Appends an event, stamped with the current time. Safe in any thread; a full disk is counted in `num_lost`."""
        with self._lock:
            if not isinstance(event, GroupRefused) or self._refused.is_first(event.reason, event.producer):
                self._append(event)
            self._flush_refused(self._clock.monotonic_s())

    def flush(self) -> None:
        """Writes the summed refusals that are due; to be called regularly while no event is written."""
        with self._lock:
            self._flush_refused(self._clock.monotonic_s())

    def close(self) -> None:
        """Writes the pending refusals and closes the file; later writes are ignored."""
        with self._lock:
            self._flush_refused(math.inf)
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _flush_refused(self, now_s: float) -> None:
        for event in self._refused.due(now_s):
            self._append(event)

    def _append(self, event: Event) -> None:
        if self._file < 0:
            return
        data = to_json(replace(event, at_s=self._clock.now_s()))
        line = json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            is_first = isinstance(event, EarlierRefusals)
            if self._size and self._size + len(line) > self._max_file_bytes and not is_first:
                self._rotate()
            if os.write(self._file, line) < len(line):
                _drop_half_a_line(self._file)
                raise OSError("short write")
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.error("events are being lost", extra={"error": str(error)})
            return
        self._size += len(line)
        if isinstance(event, GroupRefused):
            self._totals[event.reason] += event.count

    def _rotate(self) -> None:
        """Starts a new file and drops the oldest; on failure, the current file may grow by `max_file_bytes` more."""
        self._size = 0
        try:
            for number in range(KEPT_OLD_FILES, 0, -1):
                if (before := old_file(self._path, number - 1)).exists():
                    before.replace(old_file(self._path, number))
            file, self._file = self._file, _open(self._path)
        except OSError as error:
            logger.error("the event log was not rotated", extra={"error": str(error)})
            return
        os.close(file)
        self._append(EarlierRefusals(refused=dict(self._totals)))


class _PendingRefusals:
    """Counts of unwritten refusals by reason and producer, for MAX_REFUSED_KINDS pairs; others by reason alone."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}  # 0 once the first was written
        self._since_s: float | None = None

    def is_first(self, reason: str, producer: str) -> bool:
        """True for the first refusal of a (reason, producer) pair since counts were last taken: the caller writes it.

        Every other refusal is counted; beyond MAX_REFUSED_KINDS pairs those of new pairs are counted by reason alone.
        """
        key = (reason, producer)
        if key not in self._counts and len(self._counts) < MAX_REFUSED_KINDS:
            self._counts[key] = 0
            return True
        key = key if key in self._counts else (reason, "")
        self._counts[key] = self._counts.get(key, 0) + 1
        return False

    def due(self, now_s: float) -> list[GroupRefused]:
        """Removes and returns all counts, as events, once REFUSED_EVERY_S have passed since the first call with any."""
        if not self._counts:
            return []
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < REFUSED_EVERY_S:
            return []
        counts, self._counts, self._since_s = self._counts, {}, None
        return [
            GroupRefused(reason=reason, producer=producer, count=count)
            for (reason, producer), count in counts.items()
            if count
        ]


class EventTail:
    """Reads an event log while it grows: each call returns the complete events since the call before.

    Example:
        tail = EventTail(directory / "events.jsonl")
        for event in tail.read(): ...
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0  # of the file read last
        self._offset = 0  # of its first byte that was not read

    def read(self) -> list[Event]:
        """Events written since the last call, in order."""
        return list(self.stream())

    def stream(self, is_wanted: Callable[[bytes], bool] = lambda line: True) -> Iterator[Event]:
        """Yields the events written since the last call, in order; unwanted lines are not parsed.

        The caller should read to the end: the next call continues after the last event that was taken.
        """
        files = self._open_unread()
        try:
            for file in files:
                yield from self._read_rest(file, is_wanted)
        finally:
            for file in files:
                os.close(file)

    def _open_unread(self) -> list[int]:
        """Descriptors of the files that may hold new events, oldest first.

        The newest file is opened first: a file that is renamed in between is seen twice, but never missed.
        """
        files: dict[int, int] = {}
        for number in range(KEPT_OLD_FILES + 1):
            try:
                file = os.open(old_file(self._path, number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # mostly as there is none
                continue
            inode = os.fstat(file).st_ino
            if inode in files or not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                continue
            files[inode] = file
            if inode == self._inode:
                break
        return list(reversed(files.values()))

    def _read_rest(self, file: int, is_wanted: Callable[[bytes], bool]) -> Iterator[Event]:
        status = os.fstat(file)
        is_known = status.st_ino == self._inode and self._offset <= status.st_size
        self._inode, self._offset = status.st_ino, self._offset if is_known else 0
        with os.fdopen(os.dup(file), "rb") as reader:
            reader.seek(self._offset)
            while line := reader.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    break  # it is being written
                self._offset += len(line)
                if line.strip() and is_wanted(line):
                    yield _event_of(line)


def _event_of(line: bytes) -> Event:
    """The event of a line; an UnknownEvent if the line is no JSON object, as after a power cut."""
    try:
        data: object = parse_json(line)
    except ValueError:
        data = None
    return from_json(cast("JsonDict", data)) if isinstance(data, dict) else UnknownEvent(kind="", fields={})


def read_events(path: Path) -> list[Event]:
    """Every complete event in the kept files of a log, oldest first; empty if there is no file."""
    return EventTail(path).read()


def count_refusals(events: Iterable[Event]) -> Counter[str]:
    """Number of refused groups by reason; an EarlierRefusals event supplies those of deleted files."""
    counts: Counter[str] = Counter()
    for event in events:
        match event:
            case EarlierRefusals():
                counts = Counter(event.refused)
            case GroupRefused():
                counts[event.reason] += event.count
            case _:
                pass
    return counts


def old_file(path: Path, number: int) -> Path:
    """Path of a log file after `number` rotations; 0 is the file that grows."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _refusals_until(path: Path) -> Counter[str]:
    """Number of refusals by reason in a log file and the files before it; only lines with refusals are parsed."""
    if not path.is_file():
        return Counter()
    with path.open("rb") as file:
        lines = [line for line in file if b'"kind":"refused"' in line or b'"kind":"earlier"' in line]
    events: list[Event] = []
    for line in lines:
        with suppress(ValueError):  # a machine that lost power can leave anything
            events.append(from_json(parse_json(line)))
    return count_refusals(events)


def _drop_half_a_line(file: int) -> None:
    """Truncates a file after its last whole line; a power cut or a full disk can leave a partial line."""
    size = os.fstat(file).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
