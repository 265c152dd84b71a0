"""The coordinator's core over both stores: what it acknowledged it still knows after a restart."""

import ast
import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from coordinator.advice import AdviceChange
from coordinator.core import CoordinatorCore
from coordinator.ledger import LedgerEntry
from coordinator.sqlite_store import SqliteCoordinatorStore
from coordinator.store import CoordinatorStore, MemoryCoordinatorStore
from swarm.clock import ManualClock
from swarm.errors import ConfigError, StorageFull, Unauthenticated
from swarm.testing.builders import make_report
from swarm.types import EdgeReport, NodeReport, PolicyVersion

ADA, BOB = "a" * 64, "b" * 64


def v(step: int, byte: int = 1) -> PolicyVersion:
    return PolicyVersion(policy_id=ADA, step=step, digest=bytes([byte]) * 32)


def report(step: int = 1, accuracy: float = 0.5, ess: float = 0.2) -> NodeReport:
    edge = EdgeReport(source=BOB, num_groups=4, age_mean_steps=2.0, ess_share=ess, mismatch_kl=0.01, reward_mean=0.5)
    return make_report(
        ADA,
        endpoints=("h:1",),
        head=v(step),
        tokens_per_s=1.5,
        reward_mean=0.25,
        num_local=1,
        num_external=2,
        num_refused=3,
        edges=(edge,),
        evaluations={"echo/all": accuracy},
    )


class Disk:
    """Opens the same store again and again, as restarts do."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._path = None if kind == "memory" else directory / "coordinator.sqlite"
        self._memory = MemoryCoordinatorStore()
        self._opened: list[CoordinatorStore] = []

    async def open(self) -> CoordinatorStore:
        store = self._memory if self._path is None else await SqliteCoordinatorStore.open(self._path)
        self._opened.append(store)
        return store

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


@pytest.fixture(params=["memory", "sqlite"])
async def disk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Disk]:
    disk = Disk(request.param, tmp_path)
    yield disk
    await disk.close()


async def core_on(disk: Disk, clock: ManualClock) -> CoordinatorCore:
    core = CoordinatorCore(clock, await disk.open())
    await core.restore()
    return core


async def test_a_restart_restores_members_ledger_advice_and_log(disk: Disk) -> None:
    clock = ManualClock()
    core = await core_on(disk, clock)
    advice = await core.heartbeat(ADA, report())
    for version in (v(0), v(1), v(2), v(1), v(2, 7)):
        assert (await core.record_versions(ADA, [version]))[0].accepted
    again = await core_on(disk, clock)
    assert again.membership.all() == core.membership.all() != []
    assert again.ledger.lineages == core.ledger.lineages != {}
    assert list(again.advice_log) == list(core.advice_log) != []
    assert again.advisor.figures(clock.now_s()) == core.advisor.figures(clock.now_s()) != []
    assert await again.heartbeat(ADA, report()) == advice


@pytest.mark.parametrize(("cost_s", "num_decisions"), [(0.0, 16), (0.5, 2)], ids=["cheap", "dear"])
async def test_decisions_take_a_bounded_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, num_decisions: int
) -> None:
    clock, decided = ManualClock(), list[float]()
    core = CoordinatorCore(clock)

    def decide(now_s: float) -> list[AdviceChange]:
        decided.append(now_s)
        clock.advance(cost_s)
        return []

    monkeypatch.setattr(core.advisor, "decide", decide)
    for _ in range(64):  # 8 s of heartbeats
        await core.heartbeat(ADA, report())
        clock.advance(0.125)
    assert len(decided) == num_decisions


async def test_a_report_in_another_name_is_refused(disk: Disk) -> None:
    core = await core_on(disk, ManualClock())
    with pytest.raises(Unauthenticated):
        await core.heartbeat(BOB, report())
    assert core.membership.all() == []


async def test_an_evaluation_is_one_row_however_many_heartbeats_repeat_it(disk: Disk) -> None:
    clock = ManualClock()
    core = await core_on(disk, clock)
    for accuracy in (0.5, 0.5, 0.5, 0.75):
        await core.heartbeat(ADA, report(accuracy=accuracy))
    again = await core_on(disk, clock)
    await again.heartbeat(ADA, report(accuracy=0.75))
    rows = (await again.store.load()).evaluations
    assert [(row.name, row.accuracy) for row in rows] == [("echo/all", 0.5), ("echo/all", 0.75)]


async def test_a_node_that_left_is_gone_after_a_restart_too(disk: Disk) -> None:
    clock = ManualClock()
    core = await core_on(disk, clock)
    await core.heartbeat(ADA, report())
    await core.leave(ADA)
    await core.leave(BOB)
    again = await core_on(disk, clock)
    assert again.live_members() == [] and [m.has_left for m in again.membership.all()] == [True]
    assert again.membership.all()[0].node_id == ADA


async def test_the_long_gone_are_forgotten_on_disk_and_the_change_of_advice_is_kept(disk: Disk) -> None:
    clock = ManualClock()
    core = await core_on(disk, clock)
    await core.heartbeat(ADA, report())
    clock.advance(2 * 24 * 3600.0)
    await core.tidy()
    again = await core_on(disk, clock)
    assert again.membership.all() == []
    assert list(again.advice_log) == list(core.advice_log)
    assert core.advice_log[-1].after == "1.00" and core.advisor.max_age_steps is not None


class FullDisk(MemoryCoordinatorStore):
    """A store that is full from some point on."""

    is_full = False

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        if self.is_full:
            raise StorageFull("no room")
        await super().add_versions(entries)


async def test_versions_that_could_not_be_written_are_not_in_the_ledger() -> None:
    store = FullDisk()
    core = CoordinatorCore(ManualClock(), store)
    await core.record_versions(ADA, [v(0)])
    store.is_full = True
    with pytest.raises(StorageFull):
        await core.record_versions(ADA, [v(1, 7), v(2, 7)])
    store.is_full = False
    assert core.ledger.head(ADA) == v(0)
    assert (await core.record_versions(ADA, [v(1)]))[0].accepted


async def test_the_rings_of_reports_are_cut_to_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = (("versions", 4), ("edges", 3), ("evaluations", 2), ("advice", 1))
    monkeypatch.setattr("coordinator.sqlite_store._RINGS", rings)
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    core = CoordinatorCore(ManualClock(), store)
    for number in range(6):
        await core.heartbeat(ADA, report(step=number, accuracy=number / 10))
        await core.record_versions(ADA, [v(number)])
    await core.tidy()
    left = await store.load()
    assert [entry.version.step for entry in left.versions] == [2, 3, 4, 5]
    again = CoordinatorCore(ManualClock(), store)
    await again.restore()
    assert again.ledger.head(ADA) == v(5), "what is left is enough to go on"
    assert (await again.record_versions(ADA, [v(6)]))[0].accepted
    assert [len(left.edges), len(left.evaluations), len(left.advice)] == [3, 2, 1]
    assert [row.accuracy for row in left.evaluations] == [0.4, 0.5]
    await store.close()


def taken(path: Path) -> bytes:
    """Content of a file, which is gone then."""
    data = path.read_bytes()
    path.unlink()
    return data


async def test_a_damaged_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.sqlite"
    for number in range(2):
        store = await SqliteCoordinatorStore.open(path)
        core = CoordinatorCore(ManualClock(), store)
        await core.record_versions(ADA, [v(step) for step in range(400)])
        await store.close()
        data = path.read_bytes()
        damaged = b"no database at all" * 100 if number else data[: len(data) // 2] + bytes(8192)
        path.write_bytes(damaged)
        caplog.clear()
        store = await SqliteCoordinatorStore.open(path)
        assert (await store.load()).versions == []
        await store.close()
        (record,) = caplog.records
        assert taken(Path(vars(record)["moved_to"])) == damaged and "check the disk" in record.message
        taken(path)


async def test_a_row_that_makes_no_sense_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = await SqliteCoordinatorStore.open(path)
    await CoordinatorCore(ManualClock(), store).heartbeat(ADA, report())
    await store.close()
    async with aiosqlite.connect(path) as database:
        await database.execute("UPDATE members SET record = substr(record, 1, 40)")
        await database.commit()
    store = await SqliteCoordinatorStore.open(path)
    with pytest.raises(ConfigError, match=r"c\.sqlite: damaged .*move it away"):
        await store.load()
    await store.close()


async def test_an_error_of_the_disk_undoes_the_whole_heartbeat(tmp_path: Path) -> None:
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    async with aiosqlite.connect(tmp_path / "c.sqlite") as other:
        await other.execute("DROP TABLE evaluations")
    core = CoordinatorCore(ManualClock(), store)
    with pytest.raises(StorageFull):
        await core.heartbeat(ADA, replace(report(), name="lost"))
    async with aiosqlite.connect(tmp_path / "c.sqlite") as other:
        rows = await other.execute_fetchall("SELECT (SELECT COUNT(*) FROM members) + (SELECT COUNT(*) FROM edges)")
    assert list(rows) == [(0,)]
    await store.close()


async def rows_in(path: Path) -> list[int]:
    counts = ", ".join(f"(SELECT COUNT(*) FROM {table})" for table in ("members", "edges", "evaluations"))
    async with aiosqlite.connect(path) as other:
        rows = await other.execute_fetchall(f"SELECT {counts}")
    return list(next(iter(rows)))


@pytest.mark.parametrize("cancelled_at", [1, 2, 3])
async def test_a_heartbeat_that_is_cancelled_anywhere_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled_at: int
) -> None:
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    executemany = aiosqlite.Connection.executemany
    calls: list[str] = []

    async def cancelling(self: aiosqlite.Connection, sql: str, rows: Any) -> Any:
        calls.append(sql)
        if len(calls) == cancelled_at:
            writing.cancel()
        return await executemany(self, sql, rows)

    monkeypatch.setattr(aiosqlite.Connection, "executemany", cancelling)
    writing = asyncio.create_task(CoordinatorCore(ManualClock(), store).heartbeat(ADA, report()))
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await rows_in(tmp_path / "c.sqlite") == [0, 0, 0]
    await CoordinatorCore(ManualClock(), store).heartbeat(ADA, report())
    assert await rows_in(tmp_path / "c.sqlite") == [1, 1, 1]
    await store.close()


async def test_writes_at_once_never_mix_their_transactions(tmp_path: Path) -> None:
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    core = CoordinatorCore(ManualClock(), store)
    member, _ = core.membership.renew(report(), 0.0)
    await asyncio.gather(*(store.put_member(member, report().edges, []) for _ in range(20)))
    assert await rows_in(tmp_path / "c.sqlite") == [1, 20, 0]
    await store.close()


def test_the_daemons_use_no_private_name_of_a_library() -> None:
    root = Path(__file__).parents[2]
    found = [
        f"{path.relative_to(root)}:{node.lineno} {node.attr}"
        for package in ("coordinator", "node")
        for path in sorted((root / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and node.attr != "_exit"  # os._exit has no other name
    ]
    assert not found, found
