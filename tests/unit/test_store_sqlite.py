"""Promises of the store on disk alone: kill -9, a limited file, a damaged file, cancellation."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path

import pytest
from sealed_groups import make_entry as entry

from swarm.clock import ManualClock
from swarm.errors import ConfigError, StorageFull
from swarm.exchange.group_store import SqliteGroupStore
from swarm.types import Cursor, Draw, DrawnGroup

WRITER = """
import asyncio, sys
from pathlib import Path
from swarm.clock import ManualClock
from swarm.exchange.group_store import SqliteGroupStore
from swarm.testing.builders import make_group, make_scored, make_sealed

async def main():
    store = await SqliteGroupStore.open(Path(sys.argv[1]), ManualClock(), 10**9)
    for task_id in range(10**6):
        sealed = make_sealed(make_group(task_id=task_id))
        await store.put(make_scored(make_group(task_id=task_id), digest=sealed.digest), sealed)
        print(sealed.digest.hex(), flush=True)

asyncio.run(main())
"""


async def open_store(path: Path, max_bytes: int = 10**9) -> SqliteGroupStore:
    return await SqliteGroupStore.open(path, ManualClock(), max_bytes)


async def test_a_killed_process_loses_no_group_whose_put_returned(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(path), stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    digests = [bytes.fromhex((await process.stdout.readexactly(65)).decode()) for _ in range(40)]
    os.kill(process.pid, signal.SIGKILL)
    digests += [bytes.fromhex(line) for line in (await process.stdout.read()).decode().split("\n") if len(line) == 64]
    await process.wait()
    store = await open_store(path)
    assert all([await store.get(digest) is not None for digest in digests])
    held = await store.load_scored(10**6)
    assert 0 <= len(held) - len(digests) <= 1  # at most the one whose put had not returned
    await store.close()


async def test_a_file_that_cannot_grow_is_storage_full_and_keeps_what_it_has(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "groups.sqlite")
    await store.put(*entry(0))
    pages = store._database._scalar("PRAGMA page_count") + 4
    store._database._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull):
        for task_id in range(1, 1000):
            await store.put(*entry(task_id))
    held = await store.load_scored(1000)
    assert held and held[0].digest == entry(0)[1].digest
    store._database._connection.execute("PRAGMA max_page_count = 100000")
    await store.put(*entry(2000))
    await store.close()


async def test_cancelling_a_writer_neither_stops_the_others_nor_tears_a_transaction(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "groups.sqlite")
    writers = [asyncio.create_task(store.put(*entry(i))) for i in range(30)]
    await asyncio.sleep(0)
    for writer in writers[::3]:
        writer.cancel()
    results = await asyncio.gather(*writers, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results[::3])
    survivors = [i for i in range(30) if i % 3]
    assert not any(isinstance(results[i], BaseException) for i in survivors)
    assert all([await store.contains(entry(i)[1].digest) for i in survivors])
    await store.put(*entry(99))
    await store.close()


async def test_a_body_that_the_disk_changed_is_left_out_of_the_refill(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    store = await open_store(path)
    for i in range(2):
        await store.put(*entry(i))
    await store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE bodies SET body = zeroblob(length(body)) WHERE sequence = 1")
    database.close()
    store = await open_store(path)
    assert [s.digest for s in await store.load_scored(10)] == [entry(1)[1].digest]
    await store.close()


async def test_a_body_that_the_disk_changed_is_sent_to_nobody(tmp_path: Path) -> None:
    """A peer charges the sender with it: after three such groups it would refuse an honest node with a bad disk."""
    path = tmp_path / "groups.sqlite"
    await filled(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE bodies SET body = zeroblob(length(body)) WHERE sequence <= 35")
        database.execute("UPDATE bodies SET body = 7 WHERE sequence = 36")  # a bit of the row's header
        database.execute("UPDATE groups SET producer = x'ff' WHERE sequence = 37")
    database.close()
    store = await open_store(path)
    assert await store.get(entry(0)[1].digest) is None and await store.contains(entry(0)[1].digest)
    cursor, sealed = (await store.since(Cursor(), 32, own_only=False))[0]
    assert (cursor.sequence, sealed.body) == (37, entry(36)[1].body), "a whole page of changed ones hides none"
    assert [scored.digest for scored in await store.load_scored(24)] == [entry(i)[1].digest for i in range(37, 60)]
    await store.close()


async def test_what_decides_about_draws_is_synced_and_groups_are_not(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "groups.sqlite")
    statements: list[str] = []
    store._database._connection.set_trace_callback(statements.append)

    async def is_synced(write: Awaitable[object]) -> bool:
        statements.clear()
        await write
        return statements[statements.index("BEGIN IMMEDIATE") - 1] == "PRAGMA synchronous = FULL"

    scored, sealed = entry(0)
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
    assert not await is_synced(store.put(scored, sealed))
    assert await is_synced(store.record_draw(draw))
    assert await is_synced(store.give_up(1, sealed.digest))
    assert await is_synced(store.abandon(1, 1))
    assert await is_synced(store.put_note("attempts", "{}"))
    assert not await is_synced(store.forget(1e12, 0))
    await store.close()


async def test_another_schema_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    await (await open_store(path)).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="schema version 99, expected 1"):
        await open_store(path)


async def test_a_journal_written_before_newcomers_were_told_apart_still_opens(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    store = await open_store(path)
    scored, sealed = entry(1)
    await store.put(scored, sealed)
    await store.record_draw(Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0))
    await store.close()
    with sqlite3.connect(path) as connection:
        for table, column in (("drawn", "is_established"), ("places", "task_id"), ("places", "env")):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    connection.close()
    store = await open_store(path)
    newcomer = DrawnGroup(scored=scored, age_steps=0, use=2, is_established=False)
    await store.record_draw(Draw(step=2, groups=(newcomer,), num_zero_variance=0))
    assert [draw.groups[0].is_established for draw in await store.draws(1)] == [True, False]
    await store.close()


def rubbish(path: Path) -> None:
    """Four pages in the middle, as a sector that was written elsewhere."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4 * 4096] = random.Random(1).randbytes(4 * 4096)
    path.write_bytes(data)


async def filled(path: Path) -> None:
    store = await open_store(path)
    for task_id in range(60):
        await store.put(*entry(task_id))
    await store.close()


async def test_a_damaged_file_is_moved_aside_when_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "groups.sqlite"
    for damage in (
        rubbish,
        lambda path: path.write_bytes(path.read_bytes()[:9000]),
        lambda p: p.write_bytes(b"no" * 99),
    ):
        await filled(path)
        damage(path)
        before = path.read_bytes()
        caplog.clear()
        store = await open_store(path)
        assert store.moved_aside is not None and store.moved_aside.read_bytes() == before
        assert await store.load_scored(10) == [] and await store.journal(0) == []
        await store.put(*entry(1))
        await store.close()
        (record,) = caplog.records
        assert vars(record)["moved_to"] == str(store.moved_aside) and "check the disk" in record.message
        store.moved_aside.unlink()
        path.unlink()


async def test_damage_that_is_met_in_the_middle_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    await filled(path)
    store = await open_store(path)
    rubbish(path)
    store._database._connection.execute("PRAGMA shrink_memory")  # it reads the disk again
    with pytest.raises(ConfigError, match=r"groups\.sqlite: damaged while the node ran .*start the node again"):
        await store.load_scored(100)
    await store.close()


async def test_rewards_that_the_disk_changed_are_left_out_of_the_refill(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    await filled(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE groups SET rewards = x'0000c07f0000c07f' WHERE sequence = 1")  # NaN
        database.execute("UPDATE groups SET rewards = x'00' WHERE sequence = 2")
        database.execute("UPDATE groups SET correction = 'exbct' WHERE sequence = 3")
    database.close()
    store = await open_store(path)
    assert len(await store.load_scored(100)) == 57
    await store.close()
