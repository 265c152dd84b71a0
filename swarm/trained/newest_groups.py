"""The newest groups in the store of a node, running or not, for people to read.

Invariant: the file is opened for reading only, so the node that writes it is never held up for longer than a read.
"""

import itertools
import sqlite3
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from swarm.errors import ConfigError
from swarm.exchange.group_database import SCORED_COLUMNS, scored_of
from swarm.types import Digest, ScoredGroup

Origin = Literal["own", "others", "all"]
_CONDITIONS = {"own": "g.is_made_here = 1", "others": "g.is_made_here = 0", "all": "1"}
MAX_VALUE_BYTES: Final = 2**28  # a group has 64 MiB at most
INSTRUCTIONS_A_LOOK: Final = 1_000_000  # of SQLite's machine: 10 ms
MAX_LOOKS: Final = 200  # in one reading: 20 s of a core; 32 groups take less than one
_LOCKED_S = 120.0  # by the node, while it writes; not measured


def newest_groups(path: Path, limit: int, origin: Origin, envs: Collection[str]) -> list[ScoredGroup]:
    """Up to `limit` groups (at least 1) of these environments, newest first. Raises ConfigError as `reading`."""
    query = (
        f"SELECT {SCORED_COLUMNS} FROM groups g JOIN bodies b USING (sequence) WHERE {_CONDITIONS[origin]} "
        "ORDER BY g.sequence DESC"
    )
    found: list[ScoredGroup] = []
    with reading(path) as connection:
        for row in connection.execute(query):
            scored = scored_of(row)
            if scored is not None and scored.group.env in envs:
                found.append(scored)
            if len(found) >= limit:
                break
    return found


def group_of(connection: sqlite3.Connection, digest: Digest) -> ScoredGroup | None:
    """The group of a digest in a store that `reading` opened; None if it is not there, or cannot be decoded."""
    query = f"SELECT {SCORED_COLUMNS} FROM groups g JOIN bodies b USING (sequence) WHERE g.digest = ?"
    row = connection.execute(query, (digest,)).fetchone()
    return None if row is None else scored_of(row)


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """Opens the store of a node, running or not, for reading only.

    Raises:
        ConfigError: there is no such file, or it cannot be read, at any time until the `with` ends.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path.parent}: no {path.name}: the node has made no group yet, or this is no node's directory"
        )
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_LOCKED_S)
        try:
            _bound(connection)
            yield connection
        finally:
            connection.close()
    except (sqlite3.Error, OverflowError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _bound(connection: sqlite3.Connection) -> None:
    """Bounds a file that anybody may have made: its views and expressions may ask for any work and any size."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    looks = itertools.count(1)
    connection.set_progress_handler(lambda: next(looks) > MAX_LOOKS, INSTRUCTIONS_A_LOOK)
