"""What both group stores agree on: horizons, and which errors mean that the disk is full.

Invariant: a digest stays known for longer than any group may be used, so a replay is never news.
"""

import errno
import sqlite3
from collections.abc import Callable
from typing import Final

BeforeWrite = Callable[[int], None]  # bytes of a write; raises OSError where a test makes the disk full

TOMBSTONE_HORIZON_S: Final = 24 * 3600.0  # far beyond any max_age_s: what is older is refused as too old anyway
MAX_TOMBSTONES: Final = 1_000_000
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG})
_FULL_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})


def is_full(error: BaseException) -> bool:
    """True for a full disk or quota, a failing device, and the page limit of the file."""
    if isinstance(error, sqlite3.Error):
        return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _FULL_CODES
    return isinstance(error, OSError) and error.errno in _FULL_ERRNOS
