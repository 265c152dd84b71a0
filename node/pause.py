"""Pause of a node: a file in its directory holds the start of the pause, which outlives restarts of node and machine.

Invariant: commands write or delete the file and nothing else; the node looks at it every second.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from swarm.config import NODE_FILE
from swarm.errors import ConfigError
from swarm.process import write_json
from swarm.read_files import read_json

PAUSED: Final = "paused.json"  # in the directory of a node
_MAX_BYTES: Final = 4096


def paused_since(directory: Path) -> float | None:
    """Wall clock at which a node was paused; None if it is not paused. A damaged file counts from its last write."""
    path = directory / PAUSED
    try:
        since_s = read_json(path, _MAX_BYTES)["since_s"]
        return min(float(since_s), time.time())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        with suppress(OSError):
            return path.stat().st_mtime
        return None


def pause(directory: Path, now_s: float) -> float:
    """Pauses the node of a directory, running or not; returns the start of the pause, an earlier one if there is one.

    Raises:
        ConfigError: `directory` is no node's directory, or the file cannot be written.
    """
    _require_node(directory)
    since_s = paused_since(directory)
    if since_s is not None:
        return since_s
    try:
        write_json(directory / PAUSED, {"since_s": now_s}, is_durable=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be paused: {error}") from None
    return now_s


def resume(directory: Path) -> float | None:
    """Ends a pause; returns its start, or None if there was none. Raises ConfigError as `pause`."""
    _require_node(directory)
    since_s = paused_since(directory)
    try:
        (directory / PAUSED).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory / PAUSED}: cannot be deleted: {error.strerror}") from None
    return since_s


def _require_node(directory: Path) -> None:
    if not (directory / NODE_FILE).is_file() and not (directory / "identity.key").is_file():
        raise ConfigError(
            f"{directory}: neither {NODE_FILE} nor identity.key is there, so no node's directory; `swarm join` makes "
            "one in swarm-node, `swarm train` in swarm-train"
        )
