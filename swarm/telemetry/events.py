"""The event log of a node: one JSON object per line, in order, readable while it grows.

Invariant: a line is written by one system call, so a reader sees it whole or not at all; a full disk loses
events and never the node; no peer decides how much is written: files rotate, and refusals are summed up.
"""

import json
import logging
import math
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from swarm.clock import Clock, SystemClock
from swarm.telemetry.event_files import EARLIER, KEPT_OLD_FILES, count_refusals, old_file
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20  # of one file; KEPT_OLD_FILES more are kept
REFUSED_EVERY_S = 30.0  # refusals of one reason and producer after the first are one line in that time
MAX_REFUSED_KINDS = 16  # reasons and producers told apart in that time; further ones are told by reason alone


class EventLog:
    """Appends events to a file. Kinds: started, put, admitted, refused, draw, step, evaluation, failure, ...

    The first refusal of a reason and producer is written at once, what follows within REFUSED_EVERY_S as one
    event with its `count` (1 where there is none). A process that is killed loses at most those of that time.

    Example:
        events = EventLog(directory / "events.jsonl")
        events.write("step", {"step": 3, "loss": 0.1})
    """

    def __init__(self, path: Path, clock: Clock | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._refused = _Refusals()
        self._file = _open(path)
        self.num_lost = 0  # events that the disk did not take
        _drop_half_a_line(self._file)
        self._size = os.fstat(self._file).st_size
        newest = path if self._size else old_file(path, 1)
        self._totals = _refusals_until(newest)
        if not self._size and newest.exists():  # killed between the two halves of a rotation
            self._append(self._earlier())

    def write(self, kind: str, fields: JsonDict) -> None:
        """Appends `{"at_s": now, "kind": kind, **fields}`; NaN and infinity become null. Safe in any thread."""
        now_s = self._clock.now_s()
        with self._lock:
            if kind != "refused" or self._refused.is_told_now(str(fields["reason"]), str(fields["producer"])):
                self._append({"at_s": now_s, "kind": kind, **fields})
            self._flush_refused(self._clock.monotonic_s())

    def flush(self) -> None:
        """Writes the refusals that are due; to be called from time to time, when nothing else happens."""
        with self._lock:
            self._flush_refused(self._clock.monotonic_s())

    def close(self) -> None:
        """Writes what is left and closes the file; later writes are ignored."""
        with self._lock:
            self._flush_refused(math.inf)
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _flush_refused(self, now_s: float) -> None:
        for reason, producer, count in self._refused.due(now_s):
            fields = {"reason": reason, "producer": producer, "count": count}
            self._append({"at_s": self._clock.now_s(), "kind": "refused", **fields})

    def _append(self, event: JsonDict) -> None:
        if self._file < 0:
            return
        line = json.dumps(finite(event), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            if self._size and self._size + len(line) > self._max_file_bytes and event["kind"] != EARLIER:
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
        self._totals.update(count_refusals([event]) if event["kind"] == "refused" else {})

    def _rotate(self) -> None:
        """Starts a new file; the oldest goes. When that fails the old one grows for as long again."""
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
        self._append(self._earlier())

    def _earlier(self) -> JsonDict:
        return {"at_s": self._clock.now_s(), "kind": EARLIER, "refused": dict(self._totals)}


class _Refusals:
    """Refusals that are not written yet: per reason and producer, at most MAX_REFUSED_KINDS of them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}  # 0 once the first was told
        self._since_s: float | None = None

    def is_told_now(self, reason: str, producer: str) -> bool:
        """Counts a refusal; True when it is the first of its kind and is to be written by itself."""
        key = (reason, producer)
        if key not in self._counts and len(self._counts) < MAX_REFUSED_KINDS:
            self._counts[key] = 0
            return True
        key = key if key in self._counts else (reason, "")
        self._counts[key] = self._counts.get(key, 0) + 1
        return False

    def due(self, now_s: float) -> list[tuple[str, str, int]]:
        """Takes (reason, producer, count) of everything that waited long enough."""
        if not self._counts:
            return []
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < REFUSED_EVERY_S:
            return []
        taken = [(reason, producer, count) for (reason, producer), count in self._counts.items() if count]
        self._counts, self._since_s = {}, None
        return taken


def finite(value: Any) -> Any:
    """The same JSON value with NaN and infinities replaced by None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in cast("JsonDict", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in cast("list[Any]", value)]
    return value


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _refusals_until(path: Path) -> Counter[str]:
    """Every refusal told by a file and the ones before it; only the lines that tell of any are parsed."""
    if not path.is_file():
        return Counter()
    with path.open("rb") as file:
        telling = [line for line in file if b'"kind":"refused"' in line or b'"kind":"earlier"' in line]
    events: list[JsonDict] = []
    for line in telling:
        with suppress(ValueError):  # a machine that lost power can leave anything
            events.append(json.loads(line))
    return count_refusals(events)


def _drop_half_a_line(file: int) -> None:
    """A machine that lost power, or a full disk, can leave the beginning of a line."""
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
