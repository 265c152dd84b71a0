"""SQLite file of a group store: schema, checks when it is opened, and transactions.

Invariant: every transaction is all or nothing; without room it raises StorageFull with everything before it intact. A
damaged file is moved aside when it is opened, and after a power cut the log has another epoch.
"""

import contextlib
import errno
import logging
import secrets
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from swarm.clock import Clock
from swarm.errors import ConfigError, StorageFull
from swarm.interfaces import BeforeWrite
from swarm.process import boot_id
from swarm.sqlite_file import DamagedFile, is_damage, is_full, move_aside

logger = logging.getLogger(__name__)

_RESERVE_BYTES: Final = 16 * 2**20  # room for journal and tombstones when bodies have filled their budget
_SCHEMA_VERSION: Final = 1
_BOOT: Final = "boot"  # key in the table of meta data: id of the machine's boot during which the file is, or was, open

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    producer TEXT NOT NULL,
    public_key BLOB NOT NULL,
    signature BLOB NOT NULL,
    is_compressed INTEGER NOT NULL,
    is_made_here INTEGER NOT NULL,
    rewards BLOB NOT NULL,
    correction TEXT NOT NULL,
    first_seen_s REAL NOT NULL,
    size_bytes INTEGER NOT NULL,
    outcomes BLOB -- of episodes, where they say more than the rewards
);
CREATE INDEX groups_own ON groups(is_made_here, sequence);
CREATE TABLE bodies (sequence INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE tombstones (digest BLOB PRIMARY KEY, deleted_s REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX tombstones_old ON tombstones(deleted_s);
CREATE TABLE draws (step INTEGER PRIMARY KEY, num_zero_variance INTEGER NOT NULL, source_weights TEXT NOT NULL);
CREATE TABLE drawn (
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    digest BLOB NOT NULL,
    age_steps INTEGER NOT NULL,
    use INTEGER NOT NULL,
    is_used_up INTEGER NOT NULL, -- 0 handed out, 1 not (any more), 2 given up
    is_established INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (step, position)
) WITHOUT ROWID;
CREATE INDEX drawn_digest ON drawn(digest);
"""
# Added to stores of earlier releases when they are opened.
_SCHEMA_OF_PLACES: Final = """
CREATE TABLE IF NOT EXISTS places (
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    producer TEXT NOT NULL,
    is_newcomer INTEGER NOT NULL,
    env TEXT NOT NULL DEFAULT '',
    task_id INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (step, position)
) WITHOUT ROWID;
"""
_LATER_COLUMNS: Final = (
    ("drawn", "is_established INTEGER NOT NULL DEFAULT 1"),
    ("groups", "outcomes BLOB"),
    ("places", "env TEXT NOT NULL DEFAULT ''"),
    ("places", "task_id INTEGER NOT NULL DEFAULT 0"),
)


class GroupFile:
    """An open file of groups, tombstones and the draw journal; see `SqliteGroupStore.open`."""

    def __init__(self, path: Path, clock: Clock, max_bytes: int, before_write: BeforeWrite | None) -> None:
        self._path, self._clock, self._max_bytes, self._before_write = path, clock, max_bytes, before_write
        self._connection: sqlite3.Connection
        self.moved_aside: Path | None = None  # new place of a damaged file, which this empty one replaces
        try:
            self._open()
        except DamagedFile as damage:
            self.moved_aside = move_aside(path, clock.now_s())
            extra = {"file": str(path), "moved_to": str(self.moved_aside), "error": str(damage)}
            logger.warning(
                "the group store is damaged and was moved aside; the node goes on with an empty one, and the learner "
                "from its checkpoint alone; check the disk, then delete the moved file",
                extra=extra,
            )
            self._open()

    def close(self) -> None:
        """Records an orderly end and closes the file; SQLite writes its log back into the file."""
        try:
            with contextlib.suppress(sqlite3.Error, StorageFull), self._transaction(0):
                self._connection.execute("DELETE FROM meta WHERE key = ?", (_BOOT,))  # a clean end
        finally:
            self._connection.close()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection.text_factory = lambda text: text.decode(errors="replace")  # wrong text is no error of SQL
            try:
                self._prepare()
                self._check()
                self._begin_epoch()
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.DatabaseError as error:
            if is_full(error):
                raise StorageFull(errno.ENOSPC, f"{self._path}: no room for the store") from error
            if is_damage(error):
                raise DamagedFile(str(error)) from None
            raise ConfigError(f"{self._path}: cannot be opened ({error}); move it away") from None
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:  # a row is missing, or no number
            raise DamagedFile(f"{type(error).__name__}: {error}") from None

    def _check(self) -> None:
        """Reads every page and the figures that are kept in memory, to find damage now and not in the middle of a step.

        .3 s for 105 MB from a cold disk, .03 s from memory. Raises DamagedFile.
        """
        problem = str(self._scalar("PRAGMA quick_check(1)"))
        if problem != "ok":
            raise DamagedFile(problem.replace("\n", " "))
        self.epoch = str(self._scalar("SELECT value FROM meta WHERE key = 'epoch'"))
        self._num_bytes = int(self._scalar("SELECT COALESCE(SUM(size_bytes), 0) FROM groups"))

    def _begin_epoch(self) -> None:
        """Begins another epoch if the machine restarted with the file open: log positions may be lost and reused."""
        known, now = self._rows("SELECT value FROM meta WHERE key = ?", (_BOOT,)), boot_id()
        if known and now and known[0][0] != now:
            self.epoch = secrets.token_hex(8)
            logger.warning("the machine went down while the store was open; newest groups may be lost")
        with contextlib.suppress(StorageFull), self._transaction(0):  # a full disk: the file opens as it was
            rows = (("epoch", self.epoch), (_BOOT, now))
            self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # but `_transaction` sets FULL where it has to
        version = int(self._scalar("PRAGMA user_version"))
        if version not in (0, _SCHEMA_VERSION):
            raise ConfigError(f"{self._path}: schema version {version}, expected {_SCHEMA_VERSION}; move it away")
        if version == 0:
            # executescript commits what is open, so the whole script is one transaction of its own.
            epoch = secrets.token_hex(8)
            script = f"{_SCHEMA} INSERT INTO meta VALUES ('epoch', '{epoch}'); PRAGMA user_version = {_SCHEMA_VERSION};"
            self._connection.executescript(f"BEGIN; {script} COMMIT;")
        self._connection.executescript(_SCHEMA_OF_PLACES)
        for table, column in _LATER_COLUMNS:
            if column.split()[0] not in {row[1] for row in self._rows(f"PRAGMA table_info({table})")}:
                self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
        page_bytes = int(self._scalar("PRAGMA page_size"))
        # Twice the budget: rows, indices and half-filled overflow pages around the bodies.
        self._connection.execute(f"PRAGMA max_page_count = {(2 * self._max_bytes + _RESERVE_BYTES) // page_bytes}")

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _scalar(self, query: str, values: tuple[Any, ...] = ()) -> Any:
        return self._connection.execute(query, values).fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self, size_bytes: int, *, is_synced: bool = True) -> Generator[None, None, None]:
        """Runs the block, all or nothing. Raises StorageFull on a full or failing disk, with everything before intact.

        `is_synced`: a power cut loses neither this transaction nor any before it, at the cost of one fsync.
        """
        try:
            if self._before_write is not None:
                self._before_write(size_bytes)
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:  # SQLite itself rolls back on some errors
                with contextlib.suppress(sqlite3.OperationalError):
                    self._connection.execute("ROLLBACK")
            if is_full(error):
                raise StorageFull(errno.ENOSPC, f"{self._path}: {error}") from error
            raise
