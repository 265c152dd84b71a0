"""The newest groups in the store of a node, running or not, for people to read.

Invariant: the file is opened for reading only, so the node that writes it is never held up for longer than a read.
"""

import sqlite3
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from swarm.errors import ConfigError
from swarm.exchange.group_database import SCORED_COLUMNS, scored_of
from swarm.types import Digest, ScoredGroup

Origin = Literal["own", "others", "all"]
_CONDITIONS = {"own": "g.is_made_here = 1", "others": "g.is_made_here = 0", "all": "1"}
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
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
