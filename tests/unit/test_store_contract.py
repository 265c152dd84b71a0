"""One contract for the store on disk and the one in memory."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sealed_groups import Entry, assert_same_scored
from sealed_groups import make_entry as entry

from swarm.clock import ManualClock
from swarm.errors import StorageFull
from swarm.exchange.group_store import SqliteGroupStore
from swarm.exchange.replay_tables import held_bytes
from swarm.interfaces import GroupStore
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.types import Cursor, Draw, DrawnGroup, SealedGroup


class Disk:
    """The storage seam: full when told so."""

    def __init__(self) -> None:
        self.error: int | None = None

    def before_write(self, size_bytes: int) -> None:
        if self.error is not None:
            raise OSError(self.error, "as told")


class Bench:
    def __init__(self, open_store: Callable[[], Awaitable[GroupStore]], clock: ManualClock, disk: Disk) -> None:
        self.open_store = open_store
        self.clock = clock
        self.disk = disk
        self.store: GroupStore

    async def reopen(self) -> GroupStore:
        await self.store.close()
        self.store = await self.open_store()
        return self.store


@pytest.fixture(params=["sqlite", "memory"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    clock, disk = ManualClock(), Disk()
    kept = MemoryGroupStore(clock, 100_000, disk.before_write)

    async def open_store() -> GroupStore:
        if request.param == "memory":
            return kept
        return await SqliteGroupStore.open(tmp_path / "groups.sqlite", clock, 100_000, disk.before_write)

    bench = Bench(open_store, clock, disk)
    bench.store = await open_store()
    yield bench
    await bench.store.close()


def draw_of(step: int, entries: list[Entry], zero_variance: tuple[bytes, ...] = ()) -> Draw:
    groups = tuple(
        DrawnGroup(scored=scored, age_steps=step % 3, use=1, is_established=scored.is_made_here or step % 2 == 0)
        for scored, _ in entries
    )
    return Draw(
        step=step,
        groups=groups,
        num_zero_variance=len(zero_variance),
        source_weights={"peer": 0.5},
        zero_variance_digests=zero_variance,
    )


async def test_what_was_put_comes_back_byte_for_byte_also_after_reopening(bench: Bench) -> None:
    scored, sealed = entry(1)
    await bench.store.put(scored, sealed)
    for _ in range(2):
        assert await bench.store.get(sealed.digest) == sealed
        assert await bench.store.contains(sealed.digest)
        assert_same_scored((await bench.store.load_scored(10))[0], scored)
        await bench.reopen()


async def test_an_unknown_digest_is_neither_held_nor_contained(bench: Bench) -> None:
    assert await bench.store.get(bytes(32)) is None and not await bench.store.contains(bytes(32))


async def test_put_is_idempotent(bench: Bench) -> None:
    first = await bench.store.put(*entry(1))
    assert await bench.store.put(*entry(1)) == first == await bench.store.head()
    assert len(await bench.store.load_scored(10)) == 1


async def test_a_restart_reads_no_more_groups_than_memory_may_hold(bench: Bench) -> None:
    entries = [entry(number) for number in range(6)]
    for each in entries:
        await bench.store.put(*each)
    one = held_bytes(entries[0][0])
    for max_bytes, count in ((0, 0), (2.5 * one, 2), (100 * one, 6)):
        found = await bench.store.load_scored(10, max_bytes)
        assert [scored.digest for scored in found] == [sealed.digest for _, sealed in entries[6 - count :]]


async def test_concurrent_writers_each_get_a_place_of_their_own(bench: Bench) -> None:
    entries = [entry(i) for i in range(50)]
    cursors = await asyncio.gather(*(bench.store.put(*e) for e in entries))
    assert sorted(c.sequence for c in cursors) == list(range(1, 51))
    assert len({c.epoch for c in cursors}) == 1


async def test_the_log_is_read_in_order_from_any_cursor(bench: Bench) -> None:
    entries = [entry(i, is_made_here=i % 2 == 0) for i in range(10)]
    for e in entries:
        await bench.store.put(*e)
    everything: list[SealedGroup] = []
    cursor = Cursor()
    while found := await bench.store.since(cursor, 3, own_only=False):
        assert len(found) <= 3
        everything += [sealed for _, sealed in found]
        cursor = found[-1][0]
    assert everything == [sealed for _, sealed in entries]
    assert cursor == await bench.store.head()
    own = await bench.store.since(Cursor(), 100, own_only=True)
    assert [sealed for _, sealed in own] == [sealed for scored, sealed in entries if scored.is_made_here]


async def test_a_cursor_of_another_epoch_starts_from_the_beginning(bench: Bench) -> None:
    cursor = await bench.store.put(*entry(1))
    external = Cursor(epoch="of another log", sequence=cursor.sequence + 5)
    assert len(await bench.store.since(external, 10, own_only=False)) == 1
    assert await bench.store.since(cursor, 10, own_only=False) == []


async def test_the_epoch_outlives_a_restart(bench: Bench) -> None:
    cursor = await bench.store.put(*entry(1))
    assert await (await bench.reopen()).head() == cursor


async def test_a_deleted_group_is_still_known_and_the_log_never_goes_back(bench: Bench) -> None:
    first, second = entry(1, first_seen_s=1.0), entry(2, first_seen_s=2.0)
    for e in (first, second):
        await bench.store.put(*e)
    head = await bench.store.head()
    assert await bench.store.forget(before_s=10.0, max_bytes=10**9) == 2
    store = await bench.reopen()
    assert await store.get(first[1].digest) is None and await store.contains(first[1].digest)
    assert await store.head() == head
    assert (await store.put(*entry(3))).sequence == head.sequence + 1


async def test_forget_keeps_the_newest_within_its_bytes(bench: Bench) -> None:
    entries = [entry(i) for i in range(6)]
    for e in entries:
        await bench.store.put(*e)
    budget = sum(sealed.size_bytes for _, sealed in entries[4:])
    assert await bench.store.forget(before_s=0.0, max_bytes=budget) == 4
    assert [s.digest for s in await bench.store.load_scored(10)] == [sealed.digest for _, sealed in entries[4:]]


async def test_tombstones_end_after_their_horizon(bench: Bench) -> None:
    scored, sealed = entry(1)
    await bench.store.put(scored, sealed)
    await bench.store.forget(before_s=1.0, max_bytes=0)
    bench.clock.advance(25 * 3600.0)
    await bench.store.forget(before_s=0.0, max_bytes=10**9)
    assert not await bench.store.contains(sealed.digest)


async def test_the_journal_gives_back_draws_whole(bench: Bench) -> None:
    entries = [entry(i) for i in range(5)]
    for e in entries:
        await bench.store.put(*e)
    zero_variance = (entries[4][1].digest,)
    draws = [draw_of(1, entries[:2]), draw_of(2, entries[2:4], zero_variance), draw_of(3, [])]
    for draw in draws:
        await bench.store.record_draw(draw)
    store = await bench.reopen()
    assert await store.journal(2) == [(2, tuple(e[1].digest for e in entries[2:4])), (3, ())]
    assert await store.uses() == {e[1].digest: 1 for e in entries}
    rebuilt = await store.draws(1)
    assert [d.step for d in rebuilt] == [1, 2, 3]
    for draw, original in zip(rebuilt, draws, strict=True):
        assert (draw.num_zero_variance, draw.zero_variance_digests) == (
            original.num_zero_variance,
            original.zero_variance_digests,
        )
        assert draw.source_weights == original.source_weights
        for mine, other in zip(draw.groups, original.groups, strict=True):
            for name in ("age_steps", "use", "is_established"):
                assert getattr(mine, name) == getattr(other, name), name
            assert_same_scored(mine.scored, other.scored)


async def test_a_step_that_is_journalled_again_replaces_the_first(bench: Bench) -> None:
    entries = [entry(i) for i in range(2)]
    for e in entries:
        await bench.store.put(*e)
    await bench.store.record_draw(draw_of(1, entries))
    await bench.store.record_draw(draw_of(1, entries[:1]))
    assert await bench.store.uses() == {entries[0][1].digest: 1}


async def test_draws_end_before_the_first_that_lost_a_group(bench: Bench) -> None:
    old, young = entry(1, first_seen_s=1.0), entry(2, first_seen_s=5.0)
    for e in (old, young):
        await bench.store.put(*e)
    await bench.store.record_draw(draw_of(1, [young]))
    await bench.store.record_draw(draw_of(2, [old, young]))
    await bench.store.forget(before_s=3.0, max_bytes=10**9)
    assert [d.step for d in await bench.store.draws(1)] == [1]


async def test_groups_that_a_resume_needs_are_never_forgotten(bench: Bench) -> None:
    entries = [entry(i) for i in range(3)]
    for e in entries:
        await bench.store.put(*e)
    await bench.store.record_draw(draw_of(1, entries[:1]))
    await bench.store.record_draw(draw_of(2, entries[1:2]))
    assert await bench.store.forget(before_s=1.0, max_bytes=0, keep_from_step=2) == 2
    assert [d.step for d in await bench.store.draws(2)] == [2]


async def test_groups_to_keep_are_never_forgotten(bench: Bench) -> None:
    entries = [entry(i) for i in range(3)]
    for e in entries:
        await bench.store.put(*e)
    kept = entries[0][1].digest
    assert await bench.store.forget(before_s=10.0, max_bytes=0, keep=[kept]) == 2
    assert [scored.digest for scored in await bench.store.load_scored(10)] == [kept]


async def test_abandoned_draws_are_empty_and_their_groups_stay_used(bench: Bench) -> None:
    entries = [entry(i) for i in range(3)]
    for step, e in enumerate(entries, start=1):
        await bench.store.put(*e)
        await bench.store.record_draw(draw_of(step, [e]))
    uses = await bench.store.uses()
    await bench.store.abandon(2, 4)
    store = await bench.reopen()
    assert [(d.step, len(d.groups)) for d in await store.draws(1)] == [(1, 1), (2, 0), (3, 0), (4, 0)]
    assert await store.uses() == uses
    await store.forget(before_s=10.0, max_bytes=0, keep_from_step=2)
    assert [d.step for d in await store.draws(2)] == [2, 3, 4]


async def test_the_journal_goes_with_its_groups_but_the_newest_step_stays(bench: Bench) -> None:
    entries = [entry(i) for i in range(3)]
    for step, e in enumerate(entries, start=1):
        await bench.store.put(*e)
        await bench.store.record_draw(draw_of(step, [e]))
    await bench.store.forget(before_s=1.0, max_bytes=0)
    assert [step for step, _ in await bench.store.journal(0)] == [3]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
async def test_a_full_disk_loses_nothing_and_works_again_when_there_is_room(bench: Bench, code: int) -> None:
    before, after = entry(1), entry(2)
    await bench.store.put(*before)
    bench.disk.error = code
    with pytest.raises(StorageFull):
        await bench.store.put(*after)
    with pytest.raises(StorageFull):
        await bench.store.record_draw(draw_of(1, [before]))
    assert await bench.store.get(before[1].digest) == before[1]
    assert not await bench.store.contains(after[1].digest)
    bench.disk.error = None
    store = await bench.reopen()
    await store.put(*after)
    assert len(await store.load_scored(10)) == 2 and await store.journal(0) == []


async def test_the_byte_budget_refuses_groups_but_not_the_journal(bench: Bench) -> None:
    stored: list[Entry] = []
    with pytest.raises(StorageFull):
        for task_id in range(10_000):
            stored.append(entry(task_id))
            await bench.store.put(*stored[-1])
    stored.pop()
    assert sum(sealed.size_bytes for _, sealed in stored) <= 100_000
    await bench.store.record_draw(draw_of(1, stored[:2]))
    assert await bench.store.forget(before_s=0.0, max_bytes=50_000) > 0
    await bench.store.put(*entry(20_000))
