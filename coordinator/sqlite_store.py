"""Coordinator state in SQLite (WAL); `coordinator.store` has the interface.

Invariant: every write is one transaction, done as a whole or undone as a whole, even if its caller is cancelled.
"""

import asyncio
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiosqlite

from coordinator.advice import AdviceChange
from coordinator.ledger import LedgerEntry
from coordinator.membership import Member
from coordinator.store import (
    MAX_ADVICE_ROWS,
    MAX_EDGE_ROWS,
    MAX_EVALUATION_ROWS,
    MAX_VERSION_ROWS,
    Remembered,
    StoredEvaluation,
)
from swarm.errors import ConfigError, StorageFull
from swarm.sqlite_file import DamagedFile, is_damage, move_aside
from swarm.types import EdgeReport, NodeId, NodeReport, PolicyVersion, Role

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, policy_id TEXT NOT NULL, branch INTEGER NOT NULL, step INTEGER NOT NULL,
    digest BLOB NOT NULL, parent INTEGER NOT NULL, at_s REAL NOT NULL, is_rewind INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS versions_of ON versions (policy_id, branch, step);
CREATE TABLE IF NOT EXISTS edges (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, reporter TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, node_id TEXT NOT NULL, step INTEGER NOT NULL,
    name TEXT NOT NULL, accuracy REAL NOT NULL);
CREATE TABLE IF NOT EXISTS advice (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, record TEXT NOT NULL);
"""
_RINGS: Final = (
    ("versions", MAX_VERSION_ROWS),
    ("edges", MAX_EDGE_ROWS),
    ("evaluations", MAX_EVALUATION_ROWS),
    ("advice", MAX_ADVICE_ROWS),
)

Rows = list[tuple[Any, ...]]
Statements = list[tuple[str, Rows]]  # SQL, and the rows it is run for


@dataclass(eq=False, kw_only=True, slots=True)
class _StoredReport:
    """Rows of one heartbeat, and the outcome of writing them."""

    members: Rows
    edges: Rows
    evaluations: Rows
    is_over: bool = False  # written, failed, or no longer awaited
    error: str = ""


class SqliteCoordinatorStore:
    """Implements `CoordinatorStore` with an SQLite file for each run.

    Example:
        store = await SqliteCoordinatorStore.open(directory / "coordinator.sqlite")
    """

    def __init__(self, database: aiosqlite.Connection, path: Path) -> None:
        self._database = database
        self._path = path
        self._writing = asyncio.Lock()  # of two transactions on one connection the later waits
        self._reports: list[_StoredReport] = []  # waiting for the disk

    @classmethod
    async def open(cls, path: Path) -> "SqliteCoordinatorStore":
        """Opens or creates the database.

        A damaged file is moved aside, and an empty database takes its place: the history of versions is lost, and
        members come back with their next heartbeat.

        Raises:
            StorageFull: the file cannot be opened or written.
            ConfigError: a newer program wrote the file.
        """
        try:
            return await cls._open(path)
        except DamagedFile as damage:
            moved_to = await asyncio.to_thread(move_aside, path, time.time())
            extra = {"file": str(path), "moved_to": str(moved_to), "error": str(damage)}
            logger.warning(
                "the coordinator's database is damaged and was moved aside; it goes on with an empty one: the history "
                "of versions is lost, members come back by themselves; check the disk, then delete the moved file",
                extra=extra,
            )
            return await cls._open(path)

    @classmethod
    async def _open(cls, path: Path) -> "SqliteCoordinatorStore":
        try:
            database = await aiosqlite.connect(path, isolation_level=None)
        except aiosqlite.Error as error:
            raise StorageFull(f"{path}: {error}") from error
        try:
            # FULL: an acknowledged version survives the loss of power too, not only kill -9.
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000"):
                await database.execute(f"PRAGMA {pragma}")
            await _require_readable(database, path)
            await database.executescript(_SCHEMA)
            await database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (row,) = await database.execute_fetchall("PRAGMA quick_check(1)")
            if row[0] != "ok":
                raise DamagedFile(row[0])
        except aiosqlite.Error as error:
            await database.close()
            if is_damage(error):
                raise DamagedFile(str(error)) from None
            raise StorageFull(f"{path}: {error}") from error
        except (ConfigError, DamagedFile):
            await database.close()
            raise
        return cls(database, path)

    async def load(self) -> Remembered:
        try:
            return await self._read()
        except (aiosqlite.Error, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._path}: damaged ({type(error).__name__}: {error}); check the disk and move it away: "
                "members come back by themselves, the history of versions is lost"
            ) from None

    async def _read(self) -> Remembered:
        members = await self._database.execute_fetchall("SELECT record FROM members")
        versions = await self._database.execute_fetchall(
            "SELECT policy_id, step, digest, branch, parent, at_s, is_rewind FROM versions ORDER BY number"
        )
        edges = await self._database.execute_fetchall("SELECT at_s, reporter, record FROM edges ORDER BY number")
        evaluations = await self._database.execute_fetchall(
            "SELECT at_s, node_id, step, name, accuracy FROM evaluations ORDER BY number"
        )
        advice = await self._database.execute_fetchall("SELECT record FROM advice ORDER BY number")
        return Remembered(
            members=[_member_of(row[0]) for row in members],
            versions=[_entry_of(row) for row in versions],
            edges=[(row[0], row[1], EdgeReport(**json.loads(row[2]))) for row in edges],
            evaluations=[
                StoredEvaluation(at_s=row[0], node_id=row[1], step=row[2], name=row[3], accuracy=row[4])
                for row in evaluations
            ],
            advice=[AdviceChange(**json.loads(row[0])) for row in advice],
        )

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        rows = [
            (v.policy_id, entry.branch, v.step, v.digest, entry.parent, entry.at_s, entry.is_rewind)
            for entry in entries
            for v in (entry.version,)
        ]
        columns = "policy_id, branch, step, digest, parent, at_s, is_rewind"
        if rows:
            await self._write([(f"INSERT INTO versions ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)])

    async def put_member(
        self, member: Member, edges: tuple[EdgeReport, ...], evaluations: list[StoredEvaluation]
    ) -> None:
        """Stores one heartbeat; heartbeats that wait for the disk share one transaction. Raises StorageFull."""
        report = _StoredReport(
            members=[(member.node_id, _encode(member))],
            edges=[(member.last_seen_s, member.node_id, _encode(edge)) for edge in edges],
            evaluations=[(row.at_s, row.node_id, row.step, row.name, row.accuracy) for row in evaluations],
        )
        self._reports.append(report)
        try:
            async with self._writing:  # the first one writes for all that wait
                if not report.is_over:
                    reports, self._reports = self._reports, []
                    await self._write_reports(reports)
        except asyncio.CancelledError:
            report.is_over = True
            raise
        if report.error:
            raise StorageFull(report.error)

    async def _write_reports(self, reports: list[_StoredReport]) -> None:
        reports = [report for report in reports if not report.is_over]

        def rows_of(table: str) -> Rows:
            return [row for report in reports for row in getattr(report, table)]

        try:
            await self._transact(
                [
                    ("INSERT OR REPLACE INTO members VALUES (?, ?)", rows_of("members")),
                    ("INSERT INTO edges (at_s, reporter, record) VALUES (?, ?, ?)", rows_of("edges")),
                    (
                        "INSERT INTO evaluations (at_s, node_id, step, name, accuracy) VALUES (?, ?, ?, ?, ?)",
                        rows_of("evaluations"),
                    ),
                ]
            )
        except StorageFull as error:
            for report in reports:
                report.is_over, report.error = True, str(error)
        except BaseException:
            self._reports = reports + self._reports  # the next one of them writes
            raise
        else:
            for report in reports:
                report.is_over = True

    async def add_advice(self, changes: list[AdviceChange]) -> None:
        rows: list[tuple[Any, ...]] = [(change.at_s, json.dumps(asdict(change))) for change in changes]
        await self._write([("INSERT INTO advice (at_s, record) VALUES (?, ?)", rows)])

    async def forget_members(self, node_ids: list[NodeId]) -> None:
        await self._write([("DELETE FROM members WHERE node_id = ?", [(node_id,) for node_id in node_ids])])

    async def trim(self) -> None:
        await self._write(
            [
                (f"DELETE FROM {table} WHERE number <= (SELECT MAX(number) FROM {table}) - ?", [(most,)])
                for table, most in _RINGS
            ]
        )

    async def close(self) -> None:
        await self._database.close()

    async def _write(self, statements: Statements) -> None:
        async with self._writing:
            await self._transact(statements)

    async def _transact(self, statements: Statements) -> None:
        """Runs statements, all or none, also if the caller is cancelled between two of them. Raises StorageFull."""
        try:
            try:
                await self._database.execute("BEGIN IMMEDIATE")
                for statement, rows in statements:
                    if rows:
                        await self._database.executemany(statement, rows)
                await self._database.commit()
            except BaseException:
                await asyncio.shield(self._database.rollback())  # queued behind whatever was cancelled
                raise
        except aiosqlite.Error as error:
            raise StorageFull(f"coordinator database: {error}") from error


def _plain(value: Any) -> Any:
    """Converts a value type for JSON, without `asdict`: its deep copies took a third of a heartbeat's time."""
    return value.hex() if isinstance(value, bytes) else {name: getattr(value, name) for name in value.__slots__}


_encode: Final = json.JSONEncoder(default=_plain).encode  # `json.dumps` would make an encoder for each value


async def _require_readable(database: aiosqlite.Connection, path: Path) -> None:
    rows = await database.execute_fetchall("PRAGMA user_version")
    found = int(next(iter(rows))[0])
    if found > SCHEMA_VERSION:
        raise ConfigError(f"{path}: schema {found}, this program knows {SCHEMA_VERSION}; use the newer program")


def _entry_of(row: Any) -> LedgerEntry:
    version = PolicyVersion(policy_id=row[0], step=row[1], digest=row[2])
    return LedgerEntry(version=version, branch=row[3], parent=row[4], at_s=row[5], is_rewind=bool(row[6]))


def _member_of(record: str) -> Member:
    data = json.loads(record)
    report = data.pop("report")
    head = report.pop("head")
    report["head"] = PolicyVersion(policy_id=head["policy_id"], step=head["step"], digest=bytes.fromhex(head["digest"]))
    report["roles"] = tuple(Role(role) for role in report["roles"])
    report["endpoints"] = tuple(report["endpoints"])
    report["edges"] = tuple(EdgeReport(**edge) for edge in report["edges"])
    return Member(report=NodeReport(**report), **data)
