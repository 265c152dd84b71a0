"""The SQLite file behind a group store: one plain function for each transaction.

Invariant: every function is all or nothing, and what cannot be written for lack of room raises StorageFull with
everything before it intact. What decides about draws is on the disk when its function returns, and with it every group
stored before: only groups since the newest of these can be lost with the power, and then the log has another epoch. A
digest stays known for longer than any group may be used, so a replay is never news. A row that the disk changed never
becomes a group, and no peer gets it: digest or signature over its bytes is checked again. A damaged file is moved aside
when it is opened. Not safe in two threads: `SqliteGroupStore` calls it on one of its own.
"""

import contextlib
import errno
import hashlib
import json
import logging
import secrets
import sqlite3
import zlib
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from swarm.clock import Clock
from swarm.errors import ConfigError, StorageFull
from swarm.exchange.reward_recheck import clamp_logprobs
from swarm.interfaces import BeforeWrite
from swarm.process import boot_id
from swarm.sqlite_file import DamagedFile, is_damage, is_full, move_aside
from swarm.types import Correction, Digest, Draw, DrawnGroup, DrawPlace, Refused, ScoredGroup, SealedGroup, short
from swarm.wire.envelopes import open_group

logger = logging.getLogger(__name__)

GIVEN_UP_USES: Final = 2**30  # what `uses` counts for a group that is never to be drawn again
TOMBSTONE_HORIZON_S: Final = 24 * 3600.0  # far beyond any max_age_s: what is older is refused as too old anyway
MAX_TOMBSTONES: Final = 1_000_000
_RESERVE_BYTES: Final = 16 * 2**20  # room for journal and tombstones when bodies have filled their budget
_SCHEMA_VERSION: Final = 1
_BOOT: Final = "boot"  # key in the table of meta data: the start of the machine in which the file is, or was, open
_NOTE: Final = "note "  # how the keys of notes begin in the table of meta data
_MAX_OPENED_BYTES: Final = 64 * 2**20  # the largest max_group_bytes that a configuration allows

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
    size_bytes INTEGER NOT NULL
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
# Also made in a store of before it was there.
_SCHEMA_OF_PLACES: Final = """
CREATE TABLE IF NOT EXISTS places (
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    producer TEXT NOT NULL,
    is_newcomer INTEGER NOT NULL,
    PRIMARY KEY (step, position)
) WITHOUT ROWID;
"""
MAX_PLACES: Final = 4096  # that the journal keeps

_SEALED_COLUMNS: Final = "g.sequence, g.digest, g.producer, g.public_key, g.signature, g.is_compressed, b.body"
_SCORED_COLUMNS: Final = f"{_SEALED_COLUMNS}, g.is_made_here, g.rewards, g.correction, g.first_seen_s, g.size_bytes"
_FROM_GROUPS: Final = "FROM groups g JOIN bodies b USING (sequence)"


class GroupDatabase:
    """Groups, tombstones and the draw journal of one node, synchronously.

    Args:
        path: the database file; its folder is created.
        clock: wall clock of the tombstones.
        max_bytes: budget of the bodies.
        before_write: called with the bytes of each write before it is committed.

    Raises:
        ConfigError: the file cannot be opened, or is of another schema version.
        StorageFull: no room to create it.
    """

    def __init__(self, path: Path, clock: Clock, max_bytes: int, before_write: BeforeWrite | None) -> None:
        self._path = path
        self._clock = clock
        self._max_bytes = max_bytes
        self._before_write = before_write
        self._connection: sqlite3.Connection
        self.moved_aside: Path | None = None  # where a damaged file is now, in place of which this one is new
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
        """Writes the log back into the file."""
        try:
            with contextlib.suppress(sqlite3.Error, StorageFull), self._transaction(0):
                self._connection.execute("DELETE FROM meta WHERE key = ?", (_BOOT,))  # where it is kept, all before is
        finally:
            self._connection.close()

    # --- groups ----------------------------------------------------------------------------------

    def put_all(self, batch: Sequence[tuple[ScoredGroup, SealedGroup]]) -> list[int | StorageFull]:
        """Sequence of each group, or why there was no room for it. Raises StorageFull for all of them."""
        results: list[int | StorageFull] = []
        num_bytes = self._num_bytes
        with self._transaction(sum(sealed.size_bytes for _, sealed in batch), is_synced=False):
            for scored, sealed in batch:
                held = self._rows("SELECT sequence FROM groups WHERE digest = ?", (sealed.digest,))
                if held:
                    results.append(int(held[0][0]))
                elif num_bytes + sealed.size_bytes > self._max_bytes:
                    message = f"{num_bytes} + {sealed.size_bytes} bytes exceed the budget of {self._max_bytes}"
                    results.append(StorageFull(errno.ENOSPC, message))
                else:
                    results.append(self._insert(scored, sealed))
                    num_bytes += sealed.size_bytes
        self._num_bytes = num_bytes
        return results

    def get(self, digest: Digest) -> SealedGroup | None:
        """The sealed group, or None where it is not held, or not as it was."""
        rows = self._rows(f"SELECT {_SEALED_COLUMNS} {_FROM_GROUPS} WHERE g.digest = ?", (digest,))
        sealed = _sealed_of(rows[0]) if rows else None
        return sealed if sealed is not None and is_whole(sealed) else None

    def contains(self, digest: Digest) -> bool:
        """True for groups held and for those deleted within the tombstone horizon."""
        query = "SELECT 1 FROM groups WHERE digest = ?1 UNION ALL SELECT 1 FROM tombstones WHERE digest = ?1 LIMIT 1"
        return bool(self._rows(query, (digest,)))

    def since(self, after: int, limit: int, own_only: bool) -> list[tuple[int, SealedGroup]]:
        """Up to `limit` groups after a sequence, oldest first; one that the disk changed is logged and left out."""
        query = (
            f"SELECT {_SEALED_COLUMNS} {_FROM_GROUPS} WHERE g.is_made_here IN (1, ?) AND g.sequence > ? "
            "ORDER BY g.sequence LIMIT ?"
        )
        while rows := self._rows(query, (1 if own_only else 0, after, limit)):
            found = [(row[0], sealed) for row in rows for sealed in (_sealed_of(row),) if is_whole(sealed)]
            if found:
                return found
            after = rows[-1][0]
        return []

    def head(self) -> int:
        """Sequence of the newest group; it never goes back when groups are deleted."""
        rows = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'groups'")
        return rows[0][0] if rows else 0

    def load_scored(self, limit: int) -> list[ScoredGroup]:
        """The newest groups, oldest first; one that no longer opens is logged and left out."""
        query = f"SELECT {_SCORED_COLUMNS} {_FROM_GROUPS} ORDER BY g.sequence DESC LIMIT ?"
        found = [_scored_of(row) for row in self._connection.execute(query, (limit,))]
        return [scored for scored in reversed(found) if scored is not None]

    # --- draw journal ----------------------------------------------------------------------------

    def record_draw(self, draw: Draw) -> None:
        """Journals a draw; the same step again replaces it."""
        rows = [
            (draw.step, position, drawn.scored.digest, drawn.age_steps, drawn.use, 0, drawn.is_established)
            for position, drawn in enumerate(draw.groups)
        ]
        rows += [
            (draw.step, len(rows) + i, digest, 0, 1, 1, True) for i, digest in enumerate(draw.zero_variance_digests)
        ]
        weights = json.dumps(draw.source_weights)
        with self._transaction(len(weights) + 64 * len(rows)):
            self._connection.execute("DELETE FROM drawn WHERE step = ?", (draw.step,))
            self._connection.execute(
                "INSERT OR REPLACE INTO draws VALUES (?, ?, ?)", (draw.step, draw.num_zero_variance, weights)
            )
            self._connection.executemany("INSERT INTO drawn VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            if draw.places:
                self._record_places(draw)

    def _record_places(self, draw: Draw) -> None:
        self._connection.execute("DELETE FROM places WHERE step = ? OR step <= ?", (draw.step, draw.step - MAX_PLACES))
        rows = [(draw.step, i, place.producer, place.is_newcomer) for i, place in enumerate(draw.places)]
        self._connection.executemany("INSERT INTO places VALUES (?, ?, ?, ?)", rows)

    def places(self, limit: int) -> list[DrawPlace]:
        """The newest places of the journalled draws, oldest first."""
        query = "SELECT producer, is_newcomer FROM places ORDER BY step DESC, position DESC LIMIT ?"
        return [DrawPlace(producer, bool(is_newcomer)) for producer, is_newcomer in self._rows(query, (limit,))][::-1]

    def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        """Draws from a step on, in order: the groups that were handed out."""
        rows = self._rows(
            "SELECT d.step, w.digest FROM draws d LEFT JOIN drawn w ON w.step = d.step AND NOT w.is_used_up "
            "WHERE d.step >= ? ORDER BY d.step, w.position",
            (from_step,),
        )
        digests: dict[int, list[Digest]] = {}
        for step, digest in rows:
            digests.setdefault(step, []).extend([] if digest is None else [digest])
        return [(step, tuple(found)) for step, found in digests.items()]

    def draws(self, from_step: int) -> list[Draw]:
        """Draws from a step on, with their groups; ends before the first that lost one."""
        draws: list[Draw] = []
        query = "SELECT step, num_zero_variance, source_weights FROM draws WHERE step >= ? ORDER BY step"
        for step, num_zero_variance, weights in self._connection.execute(query, (from_step,)).fetchall():
            entries = self._connection.execute(
                "SELECT digest, age_steps, use, is_established, is_used_up FROM drawn WHERE step = ? ORDER BY position",
                (step,),
            ).fetchall()
            with_signal = [(self._scored(entry[0]), *entry[1:4]) for entry in entries if not entry[4]]
            groups = tuple(
                DrawnGroup(scored=scored, age_steps=age, use=use, is_established=bool(is_established))
                for scored, age, use, is_established in with_signal
                if scored is not None
            )
            if len(groups) < len(with_signal):
                logger.warning("journalled draw lost a group", extra={"step": step})
                break
            digests = tuple(entry[0] for entry in entries if entry[4])
            try:
                source_weights = json.loads(weights)
            except ValueError as error:
                logger.warning("journalled draw is damaged", extra={"step": step, "error": str(error)})
                break
            draws.append(
                Draw(
                    step=step,
                    groups=groups,
                    num_zero_variance=num_zero_variance,
                    source_weights=source_weights,
                    zero_variance_digests=digests,
                )
            )
        return draws

    def abandon(self, first_step: int, last_step: int) -> None:
        """Turns draws into used-up groups that are handed out to nobody; adds those that are missing."""
        steps = [(step,) for step in range(first_step, last_step + 1)]
        with self._transaction(64 * len(steps)):
            self._connection.execute(
                "UPDATE drawn SET is_used_up = 1 WHERE is_used_up = 0 AND step BETWEEN ? AND ?",
                (first_step, last_step),
            )
            self._connection.executemany("INSERT OR IGNORE INTO draws VALUES (?, 0, '{}')", steps)

    def uses(self) -> dict[Digest, int]:
        """How often each group was drawn; GIVEN_UP_USES and more where it was given up."""
        counts = f"SUM(CASE is_used_up WHEN 2 THEN {GIVEN_UP_USES} ELSE 1 END)"
        return dict(self._rows(f"SELECT digest, {counts} FROM drawn GROUP BY digest"))

    def give_up(self, step: int, digest: Digest) -> None:
        """Takes a group out of a draw, and out of all draws to come."""
        with self._transaction(64):
            self._connection.execute("UPDATE drawn SET is_used_up = 2 WHERE step = ? AND digest = ?", (step, digest))

    def put_note(self, key: str, text: str) -> None:
        """Stores a short text; an empty one deletes it."""
        with self._transaction(len(key) + len(text)):
            if text:
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_NOTE + key, text))
            else:
                self._connection.execute("DELETE FROM meta WHERE key = ?", (_NOTE + key,))

    def notes(self) -> dict[str, str]:
        """Every note by key."""
        rows = self._rows("SELECT key, value FROM meta WHERE substr(key, 1, ?) = ?", (len(_NOTE), _NOTE))
        return {key.removeprefix(_NOTE): text for key, text in rows}

    # --- forgetting ------------------------------------------------------------------------------

    def forget(self, before_s: float, max_bytes: int, keep_from_step: int | None, keep: Collection[Digest] = ()) -> int:
        """Deletes groups first seen before a time or beyond a byte budget, oldest first; returns how many."""
        from_step, kept = 2**62 if keep_from_step is None else keep_from_step, frozenset(keep)
        victims: list[tuple[int, Digest]] = []
        num_bytes = self._num_bytes
        for sequence, digest, size_bytes, first_seen_s in self._connection.execute(
            "SELECT sequence, digest, size_bytes, first_seen_s FROM groups WHERE digest NOT IN"
            " (SELECT digest FROM drawn WHERE step >= ?) ORDER BY sequence",
            (from_step,),
        ):
            if digest not in kept and (first_seen_s < before_s or num_bytes > max_bytes):
                victims.append((sequence, digest))
                num_bytes -= size_bytes
        with self._transaction(0, is_synced=False):
            self._delete(victims, from_step)
        self._num_bytes = num_bytes
        return len(victims)

    def _delete(self, victims: Sequence[tuple[int, Digest]], keep: int) -> None:
        now_s = self._clock.now_s()
        sequences = [(sequence,) for sequence, _ in victims]
        self._connection.executemany("DELETE FROM bodies WHERE sequence = ?", sequences)  # first: frees pages
        self._connection.executemany("DELETE FROM groups WHERE sequence = ?", sequences)
        self._connection.executemany(
            "INSERT OR REPLACE INTO tombstones VALUES (?, ?)", [(digest, now_s) for _, digest in victims]
        )
        self._connection.execute("DELETE FROM tombstones WHERE deleted_s < ?", (now_s - TOMBSTONE_HORIZON_S,))
        excess = int(self._scalar("SELECT COUNT(*) FROM tombstones")) - MAX_TOMBSTONES
        if excess > 0:
            self._connection.execute(
                "DELETE FROM tombstones WHERE digest IN (SELECT digest FROM tombstones ORDER BY deleted_s LIMIT ?)",
                (excess,),
            )
        # Steps all of whose groups are gone can never be drawn again; the newest step numbers the next one.
        gone = (
            "SELECT step FROM draws WHERE step < ? AND step < (SELECT MAX(step) FROM draws) AND step NOT IN"
            " (SELECT step FROM drawn WHERE digest IN (SELECT digest FROM groups))"
        )
        steps = self._connection.execute(gone, (keep,)).fetchall()
        self._connection.executemany("DELETE FROM drawn WHERE step = ?", steps)
        self._connection.executemany("DELETE FROM draws WHERE step = ?", steps)

    # --- inside ----------------------------------------------------------------------------------

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
        """Finds now, and not in the middle of a step, what the disk damaged.

        Every page is read once: .3 s for 105 MB from a cold disk, .03 s from memory.
        """
        problem = str(self._scalar("PRAGMA quick_check(1)"))
        if problem != "ok":
            raise DamagedFile(problem.replace("\n", " "))
        self.epoch = str(self._scalar("SELECT value FROM meta WHERE key = 'epoch'"))
        self._num_bytes = int(self._scalar("SELECT COALESCE(SUM(size_bytes), 0) FROM groups"))

    def _begin_epoch(self) -> None:
        """Another epoch where the power was cut: positions that peers know may have been lost, and come again."""
        known, now = self._rows("SELECT value FROM meta WHERE key = ?", (_BOOT,)), boot_id()
        if known and now and known[0][0] != now:
            self.epoch = secrets.token_hex(8)
            logger.warning("the machine went down while the store was open; newest groups may be lost")
        with contextlib.suppress(StorageFull), self._transaction(0):  # opened all the same, as it was
            rows = (("epoch", self.epoch), (_BOOT, now))
            self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # but `_transaction` says FULL
        version = int(self._scalar("PRAGMA user_version"))
        if version not in (0, _SCHEMA_VERSION):
            raise ConfigError(f"{self._path}: schema version {version}, expected {_SCHEMA_VERSION}; move it away")
        if version == 0:
            # executescript commits what is open, so the whole script is one transaction of its own.
            epoch = secrets.token_hex(8)
            script = f"{_SCHEMA} INSERT INTO meta VALUES ('epoch', '{epoch}'); PRAGMA user_version = {_SCHEMA_VERSION};"
            self._connection.executescript(f"BEGIN; {script} COMMIT;")
        if "is_established" not in {row[1] for row in self._rows("PRAGMA table_info(drawn)")}:  # a file of 0.1.0
            self._connection.execute("ALTER TABLE drawn ADD COLUMN is_established INTEGER NOT NULL DEFAULT 1")
        self._connection.executescript(_SCHEMA_OF_PLACES)
        page_bytes = int(self._scalar("PRAGMA page_size"))
        # Twice the budget: rows, indices and half-filled overflow pages around the bodies.
        self._connection.execute(f"PRAGMA max_page_count = {(2 * self._max_bytes + _RESERVE_BYTES) // page_bytes}")

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _scalar(self, query: str, values: tuple[Any, ...] = ()) -> Any:
        return self._connection.execute(query, values).fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self, size_bytes: int, *, is_synced: bool = True) -> Generator[None, None, None]:
        """All or nothing; a full or failing disk becomes StorageFull with everything before it intact.

        `is_synced`: a power cut loses neither this nor anything before it, for one fsync.
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

    def _insert(self, scored: ScoredGroup, sealed: SealedGroup) -> int:
        inserted = self._connection.execute(
            "INSERT INTO groups (digest, producer, public_key, signature, is_compressed, is_made_here, rewards,"
            " correction, first_seen_s, size_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                sealed.digest,
                sealed.producer,
                sealed.public_key,
                sealed.signature,
                sealed.is_compressed,
                scored.is_made_here,
                _guarded(np.asarray(scored.rewards, "<f4").tobytes(), scored.correction),
                str(scored.correction),
                scored.first_seen_s,
                sealed.size_bytes,
            ),
        )
        sequence = inserted.lastrowid
        assert sequence is not None
        self._connection.execute("INSERT INTO bodies VALUES (?, ?)", (sequence, sealed.body))
        return sequence

    def _scored(self, digest: Digest) -> ScoredGroup | None:
        query = f"SELECT {_SCORED_COLUMNS} {_FROM_GROUPS} WHERE g.digest = ?"
        row = self._connection.execute(query, (digest,)).fetchone()
        return None if row is None else _scored_of(row)


def is_whole(sealed: SealedGroup) -> bool:
    """Whether a stored group is as it was written. Whoever sends another one is charged with it (3.3 us for 4 KiB)."""
    if hashlib.sha256(sealed.body).digest() == sealed.digest:
        return True
    logger.warning("stored group is not as it was written, and is not sent", extra={"digest": short(sealed.digest)})
    return False


def _sealed_of(row: tuple[Any, ...]) -> SealedGroup:
    """The group of a row of _SEALED_COLUMNS, or of _SCORED_COLUMNS, which begin with them."""
    _, _, producer, _, _, is_compressed, _ = row[:7]
    # Where a bit of a row's header flipped, a value has another type.
    digest, public_key, signature, body = (row[i] if isinstance(row[i], bytes) else b"" for i in (1, 3, 4, 6))
    return SealedGroup(
        digest=digest,
        producer=str(producer),
        public_key=public_key,
        signature=signature,
        is_compressed=bool(is_compressed),
        body=body,
    )


def _scored_of(row: tuple[Any, ...]) -> ScoredGroup | None:
    """The group of a row of _SCORED_COLUMNS with this node's rewards; None when the disk changed its bytes."""
    sealed = _sealed_of(row)
    group = open_group(sealed, _MAX_OPENED_BYTES)
    if isinstance(group, Refused):
        logger.warning("stored group does not open", extra={"digest": short(sealed.digest), "reason": group.reason})
        return None
    is_made_here, blob, name, first_seen_s, size_bytes = row[7:]
    try:
        correction = Correction(name)
        plain: bytes = blob[: 4 * len(group.rollouts)]
        if blob != plain and blob != _guarded(plain, correction):  # without a checksum: of release 0.1.0
            raise ValueError("its checksum is another one")
        rewards = np.frombuffer(plain, "<f4").astype(np.float32)
        first_seen_s = float(first_seen_s)
    except (TypeError, ValueError) as error:
        rewards, correction = np.zeros(0, np.float32), Correction.EXACT
        logger.warning("stored group has no rewards", extra={"digest": short(sealed.digest), "error": str(error)})
    if len(rewards) != len(group.rollouts) or not np.isfinite(rewards).all():
        return None
    return ScoredGroup(
        digest=sealed.digest,
        group=clamp_logprobs(group),
        rewards=rewards,
        correction=correction,
        is_made_here=bool(is_made_here),
        first_seen_s=first_seen_s,
        size_bytes=size_bytes,
    )


def _guarded(rewards: bytes, correction: Correction) -> bytes:
    """Rewards with a checksum of them: no signature covers what this node found a group worth."""
    return rewards + zlib.crc32(rewards + str(correction).encode()).to_bytes(4, "little")
