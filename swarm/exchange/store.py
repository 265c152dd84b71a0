"""Durable, content-addressed groups of one node: an append-only log, bodies, tombstones, and the draw journal.

Invariant: once `put` or `record_draw` returned, a kill -9 of the process loses nothing of it. SQLite in
WAL mode with synchronous=NORMAL gives exactly that: a commit is in the operating system's cache, which
outlives the process; a power cut may take the newest commits, never the file. FULL would add one fsync
to every commit for the power cut alone.
"""

import asyncio
import contextlib
import errno
import json
import logging
import secrets
import sqlite3
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from swarm.clock import Clock
from swarm.errors import ConfigError, StorageFull
from swarm.exchange.checks import clamp_logprobs
from swarm.exchange.limits import MAX_TOMBSTONES, TOMBSTONE_HORIZON_S, BeforeWrite, is_full
from swarm.exchange.memory_store import MemoryGroupStore
from swarm.types import Correction, Cursor, Digest, Draw, DrawnGroup, Refused, ScoredGroup, SealedGroup, short
from swarm.wire.convert import open_group

__all__ = ["SCHEMA_VERSION", "MemoryGroupStore", "SqliteGroupStore"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SCHEMA_VERSION: Final = 1
_MAX_OPENED_BYTES: Final = 64 * 2**20  # the largest max_group_bytes that a configuration allows
_RESERVE_BYTES: Final = 16 * 2**20  # room for journal and tombstones when bodies have filled their budget

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    producer TEXT NOT NULL,
    public_key BLOB NOT NULL,
    signature BLOB NOT NULL,
    is_compressed INTEGER NOT NULL,
    is_local INTEGER NOT NULL,
    rewards BLOB NOT NULL,
    correction TEXT NOT NULL,
    first_seen_s REAL NOT NULL,
    size_bytes INTEGER NOT NULL
);
CREATE INDEX groups_own ON groups(is_local, sequence);
CREATE TABLE bodies (sequence INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE tombstones (digest BLOB PRIMARY KEY, deleted_s REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX tombstones_old ON tombstones(deleted_s);
CREATE TABLE draws (step INTEGER PRIMARY KEY, num_silent INTEGER NOT NULL, source_weights TEXT NOT NULL);
CREATE TABLE drawn (
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    digest BLOB NOT NULL,
    age_steps INTEGER NOT NULL,
    use INTEGER NOT NULL,
    is_silent INTEGER NOT NULL,
    PRIMARY KEY (step, position)
) WITHOUT ROWID;
CREATE INDEX drawn_digest ON drawn(digest);
"""

_SEALED_COLUMNS: Final = "g.sequence, g.digest, g.producer, g.public_key, g.signature, g.is_compressed, b.body"
_SCORED_COLUMNS: Final = f"{_SEALED_COLUMNS}, g.is_local, g.rewards, g.correction, g.first_seen_s, g.size_bytes"
_FROM_GROUPS: Final = "FROM groups g JOIN bodies b USING (sequence)"


@dataclass(slots=True)
class _Pending:
    scored: ScoredGroup
    sealed: SealedGroup
    result: "asyncio.Future[Cursor]"


class SqliteGroupStore:
    """`GroupStore` in one SQLite file. One thread of its own touches the database, one function per transaction.

    A transaction is a plain function on that thread, so cancelling a caller can never leave half of it.

    Example:
        store = await SqliteGroupStore.open(Path("groups.sqlite"), SystemClock(), max_bytes=2**31)
        cursor = await store.put(scored, sealed)
        await store.close()
    """

    def __init__(self, path: Path, clock: Clock, max_bytes: int, before_write: BeforeWrite | None) -> None:
        self._path = path
        self._clock = clock
        self._max_bytes = max_bytes
        self._before_write = before_write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="group-store")
        self._database: sqlite3.Connection
        self._epoch = ""
        self._num_bytes = 0
        self._pending: list[_Pending] = []
        self._writer = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def open(
        cls, path: Path, clock: Clock, max_bytes: int, before_write: BeforeWrite | None = None
    ) -> "SqliteGroupStore":
        """Opens or creates the store.

        Args:
            path: the database file; its folder is created.
            clock: wall clock of the tombstones.
            max_bytes: budget of the bodies; `put` raises StorageFull beyond it.
            before_write: called with the bytes of each write before it is committed; the storage seam at
                which a test raises OSError(ENOSPC).

        Raises:
            ConfigError: the file is no store, or one of another schema version.
            StorageFull: no room to create it.
        """
        store = cls(path, clock, max_bytes, before_write)
        try:
            await store._call(store._open)
        except BaseException:
            store._thread.shutdown(wait=False)
            raise
        return store

    async def put(self, scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        """Stores one group; writers that wait together share one transaction. Raises StorageFull."""
        entry = _Pending(scored, sealed, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        try:
            async with self._writer:
                if not entry.result.done():
                    await self._write_pending()
        except asyncio.CancelledError:
            entry.result.cancel()  # written or not: a later put of the same group is idempotent
            raise
        return await entry.result

    async def get(self, digest: Digest) -> SealedGroup | None:
        """The sealed group, or None."""
        rows = await self._read(f"SELECT {_SEALED_COLUMNS} {_FROM_GROUPS} WHERE g.digest = ?", (digest,))
        return _sealed_of(rows[0]) if rows else None

    async def contains(self, digest: Digest) -> bool:
        """True for groups held and for those deleted within the tombstone horizon."""
        query = "SELECT 1 FROM groups WHERE digest = ?1 UNION ALL SELECT 1 FROM tombstones WHERE digest = ?1 LIMIT 1"
        return bool(await self._read(query, (digest,)))

    async def since(self, cursor: Cursor, limit: int, own_only: bool) -> list[tuple[Cursor, SealedGroup]]:
        """Up to `limit` entries after `cursor`, oldest first; from the start when the epoch differs."""
        after = cursor.sequence if cursor.epoch == self._epoch else 0
        rows = await self._read(
            f"SELECT {_SEALED_COLUMNS} {_FROM_GROUPS} WHERE g.is_local IN (1, ?) AND g.sequence > ? "
            "ORDER BY g.sequence LIMIT ?",
            (1 if own_only else 0, after, limit),
        )
        return [(Cursor(epoch=self._epoch, sequence=row[0]), _sealed_of(row)) for row in rows]

    async def head(self) -> Cursor:
        """Position of the newest entry; it never goes back when entries are deleted."""
        rows = await self._read("SELECT seq FROM sqlite_sequence WHERE name = 'groups'", ())
        return Cursor(epoch=self._epoch, sequence=rows[0][0] if rows else 0)

    async def record_draw(self, draw: Draw) -> None:
        """Journals a draw; the same step again replaces it. Raises StorageFull."""
        rows = [
            (draw.step, position, drawn.scored.digest, drawn.age_steps, drawn.use, 0)
            for position, drawn in enumerate(draw.groups)
        ]
        rows += [(draw.step, len(rows) + i, digest, 0, 1, 1) for i, digest in enumerate(draw.silent)]
        await self._call(self._record_draw, draw, rows)

    async def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        """Journalled draws from a step on, in order: the groups that were handed out."""
        rows = await self._read(
            "SELECT d.step, w.digest FROM draws d LEFT JOIN drawn w ON w.step = d.step AND NOT w.is_silent "
            "WHERE d.step >= ? ORDER BY d.step, w.position",
            (from_step,),
        )
        digests: dict[int, list[Digest]] = {}
        for step, digest in rows:
            digests.setdefault(step, []).extend([] if digest is None else [digest])
        return [(step, tuple(found)) for step, found in digests.items()]

    async def draws(self, from_step: int) -> list[Draw]:
        """Journalled draws from a step on, with their groups; ends before the first that lost one."""
        return await self._call(self._draws, from_step)

    async def uses(self) -> dict[Digest, int]:
        """How often each group was drawn, from the journal."""
        rows = await self._read("SELECT digest, COUNT(*) FROM drawn GROUP BY digest", ())
        return {row[0]: row[1] for row in rows}

    async def load_scored(self, limit: int) -> list[ScoredGroup]:
        """The newest stored groups, oldest first; one that no longer opens is logged and left out."""
        return await self._call(self._load_scored, limit)

    async def forget(self, before_s: float, max_bytes: int, keep_from_step: int | None = None) -> int:
        """Deletes groups first seen before a time or beyond a byte budget, oldest first; returns how many.

        Groups drawn for `keep_from_step` or later stay. The journal of earlier steps goes with its groups.
        """
        return await self._call(self._forget, before_s, max_bytes, keep_from_step)

    async def close(self) -> None:
        """Writes the log back into the file and closes it; further calls fail."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
            self._thread.shutdown(wait=False)

    # --- on the event loop -----------------------------------------------------------------------

    async def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _read(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return await self._call(lambda: self._database.execute(query, values).fetchall())

    async def _write_pending(self) -> None:
        """Writes all that wait as one transaction, whoever of them is cancelled meanwhile."""
        batch, self._pending = self._pending, []
        write = asyncio.ensure_future(self._call(self._put_all, batch))
        write.add_done_callback(lambda done: self._settle(batch, done))
        await asyncio.wait([write])

    def _settle(self, batch: Sequence[_Pending], done: "asyncio.Future[list[int | StorageFull]]") -> None:
        """Tells every waiting writer what became of its group."""
        failure = asyncio.CancelledError() if done.cancelled() else done.exception()
        results = [failure] * len(batch) if failure is not None else done.result()
        for entry, result in zip(batch, results, strict=True):
            if entry.result.done():
                continue
            if isinstance(result, BaseException):
                entry.result.set_exception(result)
            else:
                entry.result.set_result(Cursor(epoch=self._epoch, sequence=result))

    # --- on the thread: one function per transaction ---------------------------------------------

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._create()
        except sqlite3.DatabaseError as error:
            if is_full(error):
                raise StorageFull(errno.ENOSPC, f"{self._path}: no room for the store") from error
            raise ConfigError(f"{self._path}: not a group store ({error}); move it away") from None
        self._epoch = str(self._scalar("SELECT value FROM meta WHERE key = 'epoch'"))
        self._num_bytes = int(self._scalar("SELECT COALESCE(SUM(size_bytes), 0) FROM groups"))

    def _create(self) -> None:
        version = int(self._scalar("PRAGMA user_version"))
        if version not in (0, SCHEMA_VERSION):
            raise ConfigError(f"{self._path}: schema version {version}, expected {SCHEMA_VERSION}; move it away")
        if version == 0:
            # executescript commits what is open, so the whole script is one transaction of its own.
            epoch = secrets.token_hex(8)
            script = f"{_SCHEMA} INSERT INTO meta VALUES ('epoch', '{epoch}'); PRAGMA user_version = {SCHEMA_VERSION};"
            self._database.executescript(f"BEGIN; {script} COMMIT;")
        page_bytes = int(self._scalar("PRAGMA page_size"))
        # Twice the budget: rows, indices and half-filled overflow pages around the bodies.
        self._database.execute(f"PRAGMA max_page_count = {(2 * self._max_bytes + _RESERVE_BYTES) // page_bytes}")

    def _scalar(self, query: str, values: tuple[Any, ...] = ()) -> Any:
        return self._database.execute(query, values).fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self, size_bytes: int) -> Generator[None, None, None]:
        """All or nothing; a full or failing disk becomes StorageFull with everything before it intact."""
        try:
            if self._before_write is not None:
                self._before_write(size_bytes)
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.in_transaction:  # SQLite itself rolls back on some errors
                with contextlib.suppress(sqlite3.OperationalError):
                    self._database.execute("ROLLBACK")
            if is_full(error):
                raise StorageFull(errno.ENOSPC, f"{self._path}: {error}") from error
            raise

    def _put_all(self, batch: Sequence[_Pending]) -> list[int | StorageFull]:
        """Sequence of each entry, or why there was no room for it."""
        results: list[int | StorageFull] = []
        num_bytes = self._num_bytes
        with self._transaction(sum(entry.sealed.size_bytes for entry in batch)):
            for entry in batch:
                held = self._database.execute("SELECT sequence FROM groups WHERE digest = ?", (entry.sealed.digest,))
                row = held.fetchone()
                if row is not None:
                    results.append(int(row[0]))
                elif num_bytes + entry.sealed.size_bytes > self._max_bytes:
                    message = f"{num_bytes} + {entry.sealed.size_bytes} bytes exceed the budget of {self._max_bytes}"
                    results.append(StorageFull(errno.ENOSPC, message))
                else:
                    results.append(self._insert(entry.scored, entry.sealed))
                    num_bytes += entry.sealed.size_bytes
        self._num_bytes = num_bytes
        return results

    def _insert(self, scored: ScoredGroup, sealed: SealedGroup) -> int:
        inserted = self._database.execute(
            "INSERT INTO groups (digest, producer, public_key, signature, is_compressed, is_local, rewards,"
            " correction, first_seen_s, size_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                sealed.digest,
                sealed.producer,
                sealed.public_key,
                sealed.signature,
                sealed.is_compressed,
                scored.is_local,
                np.asarray(scored.rewards, "<f4").tobytes(),
                str(scored.correction),
                scored.first_seen_s,
                sealed.size_bytes,
            ),
        )
        sequence = inserted.lastrowid
        assert sequence is not None
        self._database.execute("INSERT INTO bodies VALUES (?, ?)", (sequence, sealed.body))
        return sequence

    def _record_draw(self, draw: Draw, rows: Sequence[tuple[Any, ...]]) -> None:
        weights = json.dumps(draw.source_weights)
        with self._transaction(len(weights) + 64 * len(rows)):
            self._database.execute("DELETE FROM drawn WHERE step = ?", (draw.step,))
            self._database.execute(
                "INSERT OR REPLACE INTO draws VALUES (?, ?, ?)", (draw.step, draw.num_silent, weights)
            )
            self._database.executemany("INSERT INTO drawn VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _draws(self, from_step: int) -> list[Draw]:
        draws: list[Draw] = []
        query = "SELECT step, num_silent, source_weights FROM draws WHERE step >= ? ORDER BY step"
        for step, num_silent, weights in self._database.execute(query, (from_step,)).fetchall():
            entries = self._database.execute(
                "SELECT digest, age_steps, use, is_silent FROM drawn WHERE step = ? ORDER BY position", (step,)
            ).fetchall()
            loud = [(self._scored(digest), age, use) for digest, age, use, is_silent in entries if not is_silent]
            groups = tuple(DrawnGroup(scored=s, age_steps=age, use=use) for s, age, use in loud if s is not None)
            if len(groups) < len(loud):
                logger.warning("journalled draw lost a group", extra={"step": step})
                break
            silent = tuple(digest for digest, _, _, is_silent in entries if is_silent)
            source_weights = json.loads(weights)
            draws.append(
                Draw(step=step, groups=groups, num_silent=num_silent, source_weights=source_weights, silent=silent)
            )
        return draws

    def _scored(self, digest: Digest) -> ScoredGroup | None:
        query = f"SELECT {_SCORED_COLUMNS} {_FROM_GROUPS} WHERE g.digest = ?"
        row = self._database.execute(query, (digest,)).fetchone()
        return None if row is None else _scored_of(row)

    def _load_scored(self, limit: int) -> list[ScoredGroup]:
        query = f"SELECT {_SCORED_COLUMNS} {_FROM_GROUPS} ORDER BY g.sequence DESC LIMIT ?"
        found = [_scored_of(row) for row in self._database.execute(query, (limit,))]
        return [scored for scored in reversed(found) if scored is not None]

    def _forget(self, before_s: float, max_bytes: int, keep_from_step: int | None) -> int:
        keep = 2**62 if keep_from_step is None else keep_from_step
        victims: list[tuple[int, Digest]] = []
        num_bytes = self._num_bytes
        for sequence, digest, size_bytes, first_seen_s in self._database.execute(
            "SELECT sequence, digest, size_bytes, first_seen_s FROM groups WHERE digest NOT IN"
            " (SELECT digest FROM drawn WHERE step >= ?) ORDER BY sequence",
            (keep,),
        ):
            if first_seen_s < before_s or num_bytes > max_bytes:
                victims.append((sequence, digest))
                num_bytes -= size_bytes
        with self._transaction(0):
            self._delete(victims, keep)
        self._num_bytes = num_bytes
        return len(victims)

    def _delete(self, victims: Sequence[tuple[int, Digest]], keep: int) -> None:
        now_s = self._clock.now_s()
        sequences = [(sequence,) for sequence, _ in victims]
        self._database.executemany("DELETE FROM bodies WHERE sequence = ?", sequences)  # first: frees pages
        self._database.executemany("DELETE FROM groups WHERE sequence = ?", sequences)
        self._database.executemany(
            "INSERT OR REPLACE INTO tombstones VALUES (?, ?)", [(digest, now_s) for _, digest in victims]
        )
        self._database.execute("DELETE FROM tombstones WHERE deleted_s < ?", (now_s - TOMBSTONE_HORIZON_S,))
        excess = int(self._scalar("SELECT COUNT(*) FROM tombstones")) - MAX_TOMBSTONES
        if excess > 0:
            self._database.execute(
                "DELETE FROM tombstones WHERE digest IN (SELECT digest FROM tombstones ORDER BY deleted_s LIMIT ?)",
                (excess,),
            )
        # Steps all of whose groups are gone can never be drawn again; the newest step numbers the next one.
        gone = (
            "SELECT step FROM draws WHERE step < ? AND step < (SELECT MAX(step) FROM draws) AND step NOT IN"
            " (SELECT step FROM drawn WHERE digest IN (SELECT digest FROM groups))"
        )
        steps = self._database.execute(gone, (keep,)).fetchall()
        self._database.executemany("DELETE FROM drawn WHERE step = ?", steps)
        self._database.executemany("DELETE FROM draws WHERE step = ?", steps)


def _sealed_of(row: tuple[Any, ...]) -> SealedGroup:
    _, digest, producer, public_key, signature, is_compressed, body = row[:7]
    return SealedGroup(
        digest=digest,
        producer=producer,
        public_key=public_key,
        signature=signature,
        is_compressed=bool(is_compressed),
        body=body,
    )


def _scored_of(row: tuple[Any, ...]) -> ScoredGroup | None:
    """A stored group with this node's rewards; None when the disk changed its bytes (the signature tells)."""
    sealed = _sealed_of(row)
    group = open_group(sealed, _MAX_OPENED_BYTES)
    if isinstance(group, Refused):
        logger.warning("stored group does not open", extra={"digest": short(sealed.digest), "reason": group.reason})
        return None
    is_local, rewards, correction, first_seen_s, size_bytes = row[7:]
    return ScoredGroup(
        digest=sealed.digest,
        group=clamp_logprobs(group),
        rewards=np.frombuffer(rewards, "<f4").astype(np.float32),
        correction=Correction(correction),
        is_local=bool(is_local),
        first_seen_s=first_seen_s,
        size_bytes=size_bytes,
    )
