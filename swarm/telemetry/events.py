"""The event file of a node: one JSON object per line, in order, readable while it grows.

Invariant: a line is written by one system call, so a reader sees it whole or not at all; a full disk
loses events and never the node.
"""

import json
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any, cast

from swarm.clock import Clock, SystemClock
from swarm.types import JsonDict

logger = logging.getLogger(__name__)


class EventLog:
    """Appends events to a file. Kinds: started, put, admitted, refused, draw, step, evaluation, failure, ...

    Example:
        events = EventLog(directory / "events.jsonl")
        events.write("step", {"step": 3, "loss": 0.1})
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.num_lost = 0  # events that the disk did not take
        _drop_half_a_line(self._file)

    def write(self, kind: str, fields: JsonDict) -> None:
        """Appends `{"at_s": now, "kind": kind, **fields}`; NaN and infinity become null. Safe in any thread."""
        event = finite({"at_s": self._clock.now_s(), "kind": kind, **fields})
        line = json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                return
            try:
                if os.write(self._file, line) < len(line):
                    _drop_half_a_line(self._file)
                    raise OSError("short write")
            except OSError as error:
                self.num_lost += 1
                if self.num_lost == 1:
                    logger.error("events are being lost", extra={"error": str(error)})

    def close(self) -> None:
        """Closes the file; later writes are ignored."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


def read_events(path: Path) -> list[JsonDict]:
    """Every complete event of a file, in order; empty when there is none."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines() if line.strip()]


def finite(value: Any) -> Any:
    """The same JSON value with NaN and infinities replaced by None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in cast("JsonDict", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in cast("list[Any]", value)]
    return value


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
