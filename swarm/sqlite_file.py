"""SQLite files on a disk that fills up or damages them: what an error means, and where a damaged file goes."""

import sqlite3
import time
from pathlib import Path
from typing import Final

from swarm.errors import is_disk_full

_FULL_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
# SQLITE_ERROR: a table or column is missing.
_DAMAGE_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})


class DamagedFile(Exception):
    """A file that has to be moved aside; its owner goes on with a new one."""


def is_damage(error: BaseException) -> bool:
    """True if an error of SQLite means that the disk changed the file."""
    return isinstance(error, sqlite3.Error) and _code(error) in _DAMAGE_CODES


def is_full(error: BaseException) -> bool:
    """True if an error means a full disk or quota, a failing device, or the page limit of the file."""
    return _code(error) in _FULL_CODES if isinstance(error, sqlite3.Error) else is_disk_full(error)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended part


def move_aside(database: Path, now_s: float) -> Path:
    """Renames a damaged SQLite file, and what lies beside it, so that a new one can take its place.

    Returns:
        The new name: `<name>.damaged-<date>`.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    aside = database.with_name(f"{database.name}.damaged-{stamp}")
    for suffix in ("-wal", "-shm", ""):  # the log first: it must never meet a new database
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    return aside
