"""Warnings and errors of a node's log, kept in its directory for `swarm why`.

Invariant: a message is written the first FIRST times, and then each time that its count is a power of two, so that a
message that repeats for days takes a few lines; no record stops the node.
"""

import json
import logging
import os
import time
from collections import Counter
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from swarm.read_files import parse_json, read_end
from swarm.telemetry.logs import fields_of

WARNINGS: Final = "warnings.jsonl"  # in the directory of a node
FIRST: Final = 3
MAX_KINDS: Final = 128  # messages of a process with a count of their own
MAX_CHARS: Final = 1000  # of the fields of a record
MAX_FILE_BYTES: Final = 2**20  # half of it goes when a node starts and finds more
MAX_READ_BYTES: Final = 256 * 2**10
PACKAGES: Final = ("swarm", "node")
# Messages that the node writes and `swarm why` looks for.
STATUS_WITHOUT_ROOM: Final = "the status is not written until there is room"
SLOW_DTYPE: Final = "passes are computed in a dtype that is slow on this machine"
DOUBT: Final = "right answers are worth nothing, or are too long"  # noted before a training begins
UPSIDE_DOWN: Final = "a right answer is worth less than an empty one"  # the same
NOTHING_TO_LEARN: Final = "there is nothing to learn from"  # in the error with which a training gives up
# Several nodes may be in one process: each keeps what its own tasks and threads log.
_DIRECTORY: Final[ContextVar[Path | None]] = ContextVar("directory", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedWarning:
    """A log record of level WARNING or above."""

    at_s: float  # wall clock
    level: str  # WARNING or ERROR
    message: str  # constant, in the code
    fields: str = ""  # `name=value`, and the error where it had one
    logger: str = ""  # the module that logged it
    count: int = 1  # times that its process had logged the message by then

    @property
    def is_error(self) -> bool:
        """True if the level is above WARNING."""
        return self.level != "WARNING"


class WarningLog(logging.Handler):
    """Log handler that appends the warnings of one node to a file in its directory, until closed (blocking).

    Example:
        warnings = WarningLog(directory)
        ...
        warnings.close()
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(logging.WARNING)
        self._directory, self._counts = directory, Counter[str]()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(directory / WARNINGS, flags, 0o600)
        except OSError:  # a full disk, which the event log reports
            self._file = -1
        for package in PACKAGES:
            logging.getLogger(package).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of this node, unless its message has become too frequent; never raises."""
        try:
            self._keep(record)
        except Exception:  # such as a value that has no text
            self.handleError(record)

    def _keep(self, record: logging.LogRecord) -> None:
        if _DIRECTORY.get() not in (None, self._directory) or self._file < 0:
            return
        if not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)  # it shows what no handler takes, and this one shows nothing
        message = record.getMessage()
        kind = message if message in self._counts or len(self._counts) < MAX_KINDS else record.name
        self._counts[kind] += 1
        count = self._counts[kind]
        if count > FIRST and count.bit_count() > 1:
            return
        entry: dict[str, Any] = {
            "at_s": record.created,
            "level": "ERROR" if record.levelno >= logging.ERROR else "WARNING",  # hivemind renames levels
            "message": message,
            "fields": _in_words(record),
            "logger": record.name,
            "count": count,
        }
        with suppress(OSError):  # a full disk, which the event log reports
            os.write(self._file, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Removes the handler and closes the file; later records are not kept."""
        for package in PACKAGES:
            logging.getLogger(package).removeHandler(self)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        super().close()


def log_as(directory: Path) -> None:
    """Assigns later log records of this task, and of tasks that it starts, to the node in `directory`."""
    _DIRECTORY.set(directory)


def note_warning(directory: Path, message: str, fields: str) -> None:
    """Stores a warning about a node that does not run yet (blocking); an OSError is ignored."""
    entry = {"at_s": time.time(), "level": "WARNING", "message": message, "fields": fields[:MAX_CHARS]}
    with suppress(OSError), (directory / WARNINGS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_warnings(directory: Path) -> list[LoggedWarning]:
    """Stored warnings of the last MAX_READ_BYTES of a node's file, oldest first (blocking); bad lines are skipped."""
    found: list[LoggedWarning] = []
    for line in read_end(directory / WARNINGS, MAX_READ_BYTES).splitlines():
        try:
            data: object = parse_json(line.encode())
            if isinstance(data, dict):
                found.append(_from_json(cast("dict[str, Any]", data)))
        except (ValueError, KeyError, TypeError, OverflowError):  # half a line, or of another release
            continue
    return found


def drop_old_warnings(directory: Path) -> None:
    """Drops the older part of a file beyond MAX_FILE_BYTES, before any process of the node writes it (blocking)."""
    path = directory / WARNINGS
    with suppress(OSError):
        if path.stat().st_size > MAX_FILE_BYTES:
            kept = read_end(path, MAX_FILE_BYTES // 2).partition("\n")[2]
            path.with_suffix(".new").write_text(kept, encoding="utf-8")
            path.with_suffix(".new").replace(path)


def _from_json(data: dict[str, Any]) -> LoggedWarning:
    return LoggedWarning(
        at_s=float(data["at_s"]),
        level=str(data["level"]),
        message=str(data["message"]),
        fields=str(data.get("fields", "")),
        count=int(data.get("count", 1)),
        logger=str(data.get("logger", "")),
    )


def _in_words(record: logging.LogRecord) -> str:
    words = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseException", error.exceptions[0])
    said = "" if error is None else f"{type(error).__name__}: {error}"
    return " ".join(filter(None, (said, words)))[:MAX_CHARS]
