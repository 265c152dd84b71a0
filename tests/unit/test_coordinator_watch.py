"""Watching a lineage: only durable versions are shown, a slow reader skips to the newest, nothing grows."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from coordinator.core import CoordinatorCore
from coordinator.head_watches import HeadWatches
from coordinator.ledger import LedgerEntry
from coordinator.sqlite_store import SqliteCoordinatorStore
from coordinator.store import MemoryCoordinatorStore
from swarm.clock import ManualClock
from swarm.errors import StorageFull, Unavailable
from swarm.simulate.virtual.coordinator import CoreClient, VirtualCoordinator
from swarm.types import PolicyVersion

ADA, BOB, EVE = "a" * 64, "b" * 64, "e" * 64

Heads = AsyncGenerator[PolicyVersion, None]


def v(step: int, byte: int = 1, policy_id: str = ADA) -> PolicyVersion:
    return PolicyVersion(policy_id=policy_id, step=step, digest=bytes([byte]) * 32)


def core_over(store: MemoryCoordinatorStore | None = None) -> CoordinatorCore:
    return CoordinatorCore(ManualClock(), store)


async def record(core: CoordinatorCore, *versions: PolicyVersion) -> list[bool]:
    return [(await core.record_versions(version.policy_id, [version]))[0].accepted for version in versions]


async def waiting_for(heads: Heads) -> "asyncio.Task[PolicyVersion]":
    """The next head, which is not there yet."""
    task = asyncio.ensure_future(anext(heads))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def end(coming: "asyncio.Task[PolicyVersion]") -> None:
    """Cancels what waits, and with it its watch."""
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)


async def test_watch_begins_with_the_head_and_goes_on_with_each_new_one() -> None:
    core = core_over()
    await record(core, v(0), v(1))
    async with aclosing(core.watch_versions(BOB, ADA)) as heads:
        assert await anext(heads) == v(1)
        coming = await waiting_for(heads)
        await record(core, v(2))
        assert await coming == v(2)
        coming = await waiting_for(heads)
        await record(core, v(5, policy_id=EVE))
        await asyncio.sleep(0)
        assert not coming.done()
        await record(core, v(4))
        assert await coming == v(4)
    assert core.watches.num_open == 0


async def test_watch_of_a_lineage_that_does_not_exist_yet_begins_with_its_first_version() -> None:
    core = core_over()
    async with aclosing(core.watch_versions(BOB, ADA)) as heads:
        coming = await waiting_for(heads)
        await record(core, v(3))
        assert await coming == v(3)


async def test_reader_that_is_slow_skips_to_the_newest_head() -> None:
    core = core_over()
    async with aclosing(core.watch_versions(BOB, ADA)) as slow, aclosing(core.watch_versions(EVE, ADA)) as quick:
        await record(core, v(0))
        assert [await anext(slow), await anext(quick)] == [v(0), v(0)]
        for step in range(1, 50):
            await record(core, v(step))
            assert await anext(quick) == v(step)
        assert await anext(slow) == v(49)
        await end(await waiting_for(slow))


async def test_neither_a_fork_nor_another_owners_version_nor_a_repetition_is_shown() -> None:
    core = core_over()
    async with aclosing(core.watch_versions(BOB, ADA)) as heads:
        await record(core, v(0), v(1))
        assert await anext(heads) == v(1)
        coming = await waiting_for(heads)
        assert await record(core, v(1, 9)) == [False]
        assert not (await core.record_versions(EVE, [v(2)]))[0].accepted
        assert await record(core, v(1)) == [True]
        await asyncio.sleep(0)
        assert not coming.done()
        await end(coming)


async def test_after_a_rewind_the_head_goes_back_to_what_was_accepted_after_it_and_not_before() -> None:
    core = core_over()
    await record(core, *(v(step) for step in range(11)))
    async with aclosing(core.watch_versions(BOB, ADA)) as heads:
        assert await anext(heads) == v(10)
        coming = await waiting_for(heads)
        assert await record(core, v(5), v(6)) == [True, True]  # resumed from 5, and made step 6 as it was
        await asyncio.sleep(0)
        assert not coming.done()
        assert await record(core, v(7, 2)) == [True]  # other weights: a new branch
        assert await coming == v(7, 2)
        await record(core, v(8, 2))
        assert await anext(heads) == v(8, 2)
    async with aclosing(core.watch_versions(BOB, ADA)) as late:
        assert await anext(late) == v(8, 2)


class SlowDisk(MemoryCoordinatorStore):
    """A store whose writes wait for the test, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.may_write = asyncio.Event()
        self.is_writing = asyncio.Event()

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        self.is_writing.set()
        await self.may_write.wait()
        if self.is_full:
            raise StorageFull("no room")
        await super().add_versions(entries)


@pytest.mark.parametrize("is_full", [False, True])
async def test_version_is_shown_only_once_it_is_durable_also_to_a_watch_that_begins_meanwhile(is_full: bool) -> None:
    store = SlowDisk()
    store.may_write.set()
    core = core_over(store)
    await record(core, v(0))
    early = core.watch_versions(BOB, ADA)
    assert await anext(early) == v(0)
    store.may_write.clear()
    store.is_writing.clear()
    store.is_full = is_full
    writing = asyncio.ensure_future(core.record_versions(ADA, [v(1)]))
    await store.is_writing.wait()
    late = core.watch_versions(EVE, ADA)
    first, second = await waiting_for(early), await waiting_for(late)
    store.may_write.set()
    if is_full:
        with pytest.raises(StorageFull):
            await writing
        assert await second == v(0)
        assert not first.done()
        first.cancel()
    else:
        await writing
        assert [await first, await second] == [v(1), v(1)]
    await asyncio.gather(first, return_exceptions=True)
    await early.aclose()
    await late.aclose()
    assert core.watches.num_open == 0


async def test_restarted_coordinator_shows_the_head_it_had_acknowledged(tmp_path: Path) -> None:
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    core = CoordinatorCore(ManualClock(), store)
    await record(core, v(0), v(1), v(2), v(1), v(2, 7))
    await store.close()
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    again = CoordinatorCore(ManualClock(), store)
    await again.restore()
    async with aclosing(again.watch_versions(BOB, ADA)) as heads:
        assert await anext(heads) == v(2, 7)
        await record(again, v(3))
        assert await anext(heads) == v(3)
    await store.close()


async def test_watches_are_bounded_for_each_node_and_in_total_and_closed_ones_make_room() -> None:
    core = core_over()
    core.watches = HeadWatches(per_node=2, total=3)
    opened = [core.watch_versions(node, ADA) for node in (BOB, BOB, EVE)]
    pending = [await waiting_for(heads) for heads in opened]
    with pytest.raises(Unavailable, match="2 watches of this node"):
        await anext(core.watch_versions(BOB, ADA))
    with pytest.raises(Unavailable, match="3 watches are open"):
        await anext(core.watch_versions(EVE, ADA))
    await end(pending[0])
    assert core.watches.num_open == 2
    again = core.watch_versions(BOB, ADA)
    coming = await waiting_for(again)
    await record(core, v(0))
    assert [await coming, await pending[1], await pending[2]] == [v(0)] * 3
    for heads in (*opened, again):
        await heads.aclose()
    assert core.watches.num_open == 0 and not core.watches._of_lineage


async def test_cancelling_a_waiting_watch_frees_it() -> None:
    core = core_over()
    coming = await waiting_for(core.watch_versions(BOB, ADA))
    assert core.watches.num_open == 1
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    assert core.watches.num_open == 0


async def test_coordinator_that_stops_ends_every_watch_at_once_and_takes_no_more() -> None:
    core = core_over()
    await record(core, v(0))
    unread, waiting = core.watch_versions(BOB, ADA), core.watch_versions(EVE, ADA)
    assert await anext(unread) == await anext(waiting) == v(0)
    coming = await waiting_for(waiting)
    await record(core, v(1))
    assert await coming == v(1)
    core.watches.end()
    for heads in (unread, waiting, core.watch_versions(BOB, ADA)):
        with pytest.raises(Unavailable, match="stops"):
            await anext(heads)
    assert core.watches.num_open == 0


async def test_watcher_of_a_virtual_coordinator_is_told_of_its_crash_and_begins_again_with_the_head() -> None:
    coordinator = VirtualCoordinator(ManualClock())
    ada, bob = CoreClient(coordinator, ADA), CoreClient(coordinator, BOB)
    await ada.record_versions([v(0)])
    heads = bob.watch_versions(ADA)
    assert await anext(heads) == v(0)
    coming = asyncio.ensure_future(anext(heads))
    await asyncio.sleep(0)
    coordinator.crash()
    with pytest.raises(Unavailable):
        await coming
    with pytest.raises(Unavailable):
        await anext(bob.watch_versions(ADA))
    await coordinator.restart()
    await ada.record_versions([v(1)])
    again = bob.watch_versions(ADA)
    assert await anext(again) == v(1)
    await again.aclose()  # type: ignore[attr-defined]
