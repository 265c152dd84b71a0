"""The files of an event log, from the one that grows to the oldest kept, and how they are read.

Invariant: a reader that looks often enough gets every event once and in order, whatever is rotated meanwhile;
refusals are counted in full even when the files that told them are gone.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from swarm.types import JsonDict

KEPT_OLD_FILES = 3
EARLIER = "earlier"  # first event of a file that follows another: all refusals until then, by reason


def old_file(path: Path, number: int) -> Path:
    """Where a file is after `number` rotations; 0 is the one that grows."""
    return path.with_name(f"{path.name}.{number}") if number else path


def read_events(path: Path) -> list[JsonDict]:
    """Every complete event that is kept, oldest first; empty when there is none."""
    return EventTail(path).read()


def count_refusals(events: Iterable[JsonDict]) -> Counter[str]:
    """Refused groups by reason, those of files that are gone included."""
    counts: Counter[str] = Counter()
    for event in events:
        if event["kind"] == EARLIER:
            counts = Counter(event["refused"])
        elif event["kind"] == "refused":
            counts[event["reason"]] += event.get("count", 1)
    return counts


class EventTail:
    """Reads a log while it grows: each call gives the complete events since the last one.

    Example:
        tail = EventTail(directory / "events.jsonl")
        for event in tail.read(): ...
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0  # of the file read last
        self._offset = 0  # of its first byte that was not read

    def read(self) -> list[JsonDict]:
        """New events, in order."""
        files = self._open_unread()
        try:
            return [event for file in files for event in self._rest_of(file)]
        finally:
            for file in files:
                os.close(file)

    def _open_unread(self) -> list[int]:
        """What may hold new events, oldest first. Opened newest first: a file that moves meanwhile is seen twice."""
        files: dict[int, int] = {}
        for number in range(KEPT_OLD_FILES + 1):
            try:
                file = os.open(old_file(self._path, number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            inode = os.fstat(file).st_ino
            if inode in files:
                os.close(file)
                continue
            files[inode] = file
            if inode == self._inode:
                break
        return list(reversed(files.values()))

    def _rest_of(self, file: int) -> list[JsonDict]:
        found = os.fstat(file)
        offset = self._offset if found.st_ino == self._inode and self._offset <= found.st_size else 0
        with os.fdopen(os.dup(file), "rb") as reader:
            reader.seek(offset)
            data = reader.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._inode, self._offset = found.st_ino, offset + len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]
