"""Structured logs: a constant message plus fields, as JSON or as one readable line.

Invariant: no field value, also of a peer, adds a line to a record; every record holds the node's name, if one is set.
"""

import json
import logging
import sys
import time
from typing import Any

from swarm.events import finite

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def setup_logging(level: str = "INFO", format: str = "console", node: str = "") -> None:
    """Sends all logs of this process to stderr, in place of the handlers of the root logger.

    Args:
        level: DEBUG, INFO, WARNING or ERROR, for our own packages; others log from WARNING (or `level`) on.
        format: `console` or `json` (one object per line).
        node: name of the node for every record; "": none.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    handler.setFormatter(JsonFormatter(node) if format == "json" else ConsoleFormatter(node))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")
    for package in ("swarm", "node", "coordinator"):
        # warnings are made at every level: `WarningLog` keeps them where nobody shows them
        logging.getLogger(package).setLevel("WARNING" if level == "ERROR" else level)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: at, level, logger, message, its fields, and the traceback if it has one."""

    def __init__(self, node: str = "") -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as JSON on one line."""
        entry = {
            "at": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record, self._node),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(finite(entry), default=str)


class ConsoleFormatter(logging.Formatter):
    """Formats a record as `12:00:01 INFO    swarm.loops: group refused node=ada reason=too_old`, traceback below."""

    def __init__(self, node: str = "") -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line, field values escaped, and below it the traceback if it has one."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={_plain(value)}" for key, value in fields_of(record, self._node).items())
        line = f"{at} {record.levelname:<7} {record.name}: {record.getMessage()}{fields}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


def fields_of(record: logging.LogRecord, node: str = "") -> dict[str, Any]:
    """Fields of a record besides its message (`extra`), and `node` if the name is not empty."""
    own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
    return {"node": node, **own} if node else own


def _plain(value: object) -> str:
    """Text of a field value, quoted and escaped if it holds a space or a non-printable character."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
