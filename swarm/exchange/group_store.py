"""Durable, content-addressed groups of one node: an append-only log, bodies, tombstones, and the draw journal.

Invariant: a kill -9 of the process loses nothing that `put` or `record_draw` wrote before it returned: a commit in WAL
mode is in the operating system's cache, which outlives the process. A power cut loses no draw and no group of a draw:
records of draws are synced, with one fsync for each step; puts of groups are not, or each would cost an fsync.
"""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swarm.clock import Clock
from swarm.errors import ConfigError, StorageFull
from swarm.exchange.group_database import GroupDatabase
from swarm.interfaces import BeforeWrite
from swarm.sqlite_file import is_damage
from swarm.types import Cursor, Digest, Draw, DrawPlace, ScoredGroup, SealedGroup

Result = TypeVar("Result")


@dataclass(slots=True)
class _Pending:
    scored: ScoredGroup
    sealed: SealedGroup
    result: "asyncio.Future[Cursor]"


class SqliteGroupStore:
    """Implements `GroupStore`, whose docstrings hold, in one SQLite file.

    Only the store's own thread touches the database. A transaction is a plain function on that thread, so cancelling a
    caller can never leave half of it.
    """

    def __init__(self, path: Path) -> None:
        """Creates a store without a database; callers use `open`."""
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="group-store")
        self._database: GroupDatabase
        self._pending: list[_Pending] = []
        self._writer = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def open(
        cls, path: Path, clock: Clock, max_bytes: int, before_write: BeforeWrite | None = None
    ) -> "SqliteGroupStore":
        """Opens or creates the store. A damaged file is moved aside, and replaced by an empty store.

        Args:
            path: the database file; its folder is created.
            clock: wall clock of the tombstones.
            max_bytes: budget of the bodies; `put` raises StorageFull beyond it.
            before_write: called with the bytes of each write before it is committed; the storage seam at which a test
                raises OSError(ENOSPC).

        Raises:
            ConfigError: the file cannot be opened, or has another schema version.
            StorageFull: the disk has no room for the file.
        """
        store = cls(path)
        try:
            store._database = await store._call(GroupDatabase, path, clock, max_bytes, before_write)
        except BaseException:
            store._thread.shutdown(wait=False)
            raise
        return store

    @property
    def moved_aside(self) -> Path | None:
        """New place of a damaged file that `open` replaced by this store; None if the file was intact or new."""
        return self._database.moved_aside

    async def put(self, scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        """Stores one group, returns its cursor; puts that wait together share one transaction. Raises StorageFull."""
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
        return await self._call(self._database.get, digest)

    async def contains(self, digest: Digest) -> bool:
        return await self._call(self._database.contains, digest)

    async def since(self, cursor: Cursor, limit: int, own_only: bool) -> list[tuple[Cursor, SealedGroup]]:
        after = cursor.sequence if cursor.epoch == self._database.epoch else 0
        found = await self._call(self._database.since, after, limit, own_only)
        return [(self._cursor(sequence), sealed) for sequence, sealed in found]

    async def head(self) -> Cursor:
        return self._cursor(await self._call(self._database.head))

    async def record_draw(self, draw: Draw) -> None:
        await self._call(self._database.record_draw, draw)

    async def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        return await self._call(self._database.journal, from_step)

    async def draws(self, from_step: int) -> list[Draw]:
        return await self._call(self._database.draws, from_step)

    async def places(self, limit: int) -> list[DrawPlace]:
        return await self._call(self._database.places, limit)

    async def abandon(self, first_step: int, last_step: int) -> None:
        await self._call(self._database.abandon, first_step, last_step)

    async def give_up(self, step: int, digest: Digest) -> None:
        await self._call(self._database.give_up, step, digest)

    async def put_note(self, key: str, text: str) -> None:
        await self._call(self._database.put_note, key, text)

    async def notes(self) -> dict[str, str]:
        return await self._call(self._database.notes)

    async def uses(self) -> dict[Digest, int]:
        return await self._call(self._database.uses)

    async def load_scored(self, limit: int, max_bytes: float = math.inf) -> list[ScoredGroup]:
        return await self._call(self._database.load_scored, limit, max_bytes)

    async def forget(
        self, before_s: float, max_bytes: int, keep_from_step: int | None = None, keep: Collection[Digest] = ()
    ) -> int:
        return await self._call(self._database.forget, before_s, max_bytes, keep_from_step, keep)

    async def close(self) -> None:
        """Closes the file, after which other calls fail; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._call(self._database.close)
            self._thread.shutdown(wait=False)

    def _cursor(self, sequence: int) -> Cursor:
        return Cursor(epoch=self._database.epoch, sequence=sequence)

    async def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            raise ConfigError(
                f"{self._path}: damaged while the node ran ({error}); check the disk and start the node again: it "
                "moves the file aside and goes on from its checkpoint"
            ) from None

    async def _write_pending(self) -> None:
        """Writes all waiting groups as one transaction, even if their callers are cancelled."""
        batch, self._pending = self._pending, []
        groups = [(entry.scored, entry.sealed) for entry in batch]
        write = asyncio.ensure_future(self._call(self._database.put_all, groups))
        write.add_done_callback(lambda done: self._settle(batch, done))
        await asyncio.wait([write])

    def _settle(self, batch: Sequence[_Pending], done: "asyncio.Future[list[int | StorageFull]]") -> None:
        """Gives every waiting writer its group's cursor, or the error."""
        failure = asyncio.CancelledError() if done.cancelled() else done.exception()
        results = [failure] * len(batch) if failure is not None else done.result()
        for entry, result in zip(batch, results, strict=True):
            if entry.result.done():
                continue
            if isinstance(result, BaseException):
                entry.result.set_exception(result)
            else:
                entry.result.set_result(self._cursor(result))
