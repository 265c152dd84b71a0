"""Errors of SQLite files on a full or failing disk, and renaming of damaged files."""

import sqlite3
import time
from pathlib import Path
from typing import Final

from swarm.errors import is_disk_full

_FULL_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
# SQLITE_ERROR: a table or column is missing.
_DAMAGE_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})


class DamagedFile(Exception):
    """A damaged SQLite file, which its owner moves aside and replaces with a new one."""


def is_damage(error: BaseException) -> bool:
    """True for an SQLite error that means a damaged file: corrupt, no database, or without a table or column."""
    return isinstance(error, sqlite3.Error) and _code(error) in _DAMAGE_CODES


def is_full(error: BaseException) -> bool:
    """True for an error that means a full disk or quota, a failing or read-only device, or the file's page limit."""
    return _code(error) in _FULL_CODES if isinstance(error, sqlite3.Error) else is_disk_full(error)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended part


def move_aside(database: Path, now_s: float) -> Path:
    """Renames a damaged SQLite file and its -wal and -shm files, so that a new database can take its place.

    Returns:
        The new path of the database: `<name>.damaged-<date>`.

    Raises:
        OSError: a file cannot be renamed.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    aside = database.with_name(f"{database.name}.damaged-{stamp}")
    for suffix in ("-wal", "-shm", ""):  # the log first: it must never meet a new database
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    return aside
