"""Reports on their way to the coordinator's disk: waiting, answered, and not kept at all."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiosqlite
import grpc
import pytest

from coordinator.core import CoordinatorCore
from coordinator.dashboard import Dashboard
from coordinator.history import MAX_MOMENTS, History
from coordinator.service import STRANGERS_STORING, CoordinatorServicer
from coordinator.sqlite_store import SqliteCoordinatorStore
from coordinator.store import MemoryCoordinatorStore
from coordinator.turns import CallerTurns
from swarm.clock import ManualClock
from swarm.config import EntryConfig, EnvironmentConfig
from swarm.errors import StorageFull
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.telemetry import Telemetry
from swarm.testing.builders import make_report
from swarm.types import EdgeReport, PolicyVersion
from swarm.wire.reports import heartbeat_to_report, report_to_heartbeat

ADA, EVE = "a" * 64, "e" * 64
EDGE = EdgeReport(source=ADA, num_groups=4, age_mean_steps=2.0, ess_share=0.2, mismatch_kl=0.01, reward_mean=0.5)
REPORT = make_report(ADA, head=PolicyVersion(policy_id=ADA, step=1, digest=bytes(32)), edges=(EDGE,))


class Caller:
    """A call of a node, as the servicer sees it."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id

    def peer(self) -> str:
        return f"ipv4:127.0.0.{1 + (self.node_id == EVE)}:4000"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise StorageFull(details) if code is grpc.StatusCode.FAILED_PRECONDITION else AssertionError(code, details)


class KnownSessions:
    """Sessions in which everybody has proved itself."""

    def require(self, context: Any) -> str:
        return context.node_id

    def refused(self, peer: str, error: Exception, num: int = 1) -> Exception:
        return error


class SlowDisk(MemoryCoordinatorStore):
    """A store that writes a report only when it is told to, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()
        self.is_full = False
        self.stored: list[tuple[str, int]] = []  # node, edges

    async def put_member(self, member: Any, edges: Any, evaluations: Any) -> None:
        await self.written.wait()
        if self.is_full:
            raise StorageFull("no room")
        self.stored.append((member.node_id, len(edges)))


def servicer_over(disk: SlowDisk, parties: Parties | None = None) -> CoordinatorServicer:
    core = CoordinatorCore(ManualClock(), disk, parties=parties)
    return CoordinatorServicer(core, cast(Any, KnownSessions()), cast(Any, None), tuple, turns=CallerTurns(parties))


def listing_ada() -> Parties:
    return Parties(EntryRule(EntryConfig(members=(ADA,)), "run", ManualClock()))


async def beat(servicer: CoordinatorServicer, node_id: str) -> Any:
    request = report_to_heartbeat(replace(REPORT, node_id=node_id))
    return await servicer.Heartbeat(request, cast(Any, Caller(node_id)))


async def test_a_heartbeat_is_answered_before_the_disk_has_it_and_finish_waits() -> None:
    disk = SlowDisk()
    servicer = servicer_over(disk)
    assert (await beat(servicer, ADA)).lease_s == 30.0 and not disk.stored
    finishing = asyncio.ensure_future(servicer.finish())
    await asyncio.sleep(0)
    assert not finishing.done()
    disk.written.set()
    await finishing
    assert disk.stored == [(ADA, 1)]


async def test_an_error_of_the_disk_is_told_by_the_next_heartbeat_until_a_report_is_stored() -> None:
    disk = SlowDisk()
    disk.is_full = True
    disk.written.set()
    servicer = servicer_over(disk)
    await beat(servicer, ADA)
    await servicer.finish()
    with pytest.raises(StorageFull, match="no room"):
        await beat(servicer, ADA)
    await servicer.finish()
    disk.is_full = False
    with pytest.raises(StorageFull, match="no room"):
        await beat(servicer, ADA)
    await servicer.finish()
    await beat(servicer, ADA)
    await servicer.finish()


@pytest.mark.parametrize("is_listing", [True, False])
async def test_what_a_stranger_says_of_others_is_not_kept(is_listing: bool) -> None:
    disk = SlowDisk()
    disk.written.set()
    servicer = servicer_over(disk, listing_ada() if is_listing else None)
    for node_id in (ADA, EVE):
        await beat(servicer, node_id)
    await servicer.finish()
    assert disk.stored == [(ADA, 1), (EVE, 0 if is_listing else 1)]


async def test_strangers_whose_reports_wait_for_a_slow_disk_leave_room_for_a_listed_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.service.HEARTBEATS_BURST", 1000.0)
    disk = SlowDisk()
    servicer = servicer_over(disk, listing_ada())
    flood = [asyncio.ensure_future(beat(servicer, EVE)) for _ in range(STRANGERS_STORING + 8)]
    while not servicer._places[True].locked():  # noqa: ASYNC110 - the flood takes them
        await asyncio.sleep(0.001)
    honest = asyncio.ensure_future(beat(servicer, ADA))
    for _ in range(100):
        await asyncio.sleep(0)
    assert honest.done()
    disk.written.set()
    await asyncio.gather(honest, *flood)
    await servicer.finish()


async def test_reports_that_wait_for_the_disk_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_commits = 0
    commit = aiosqlite.Connection.commit

    async def counting(self: aiosqlite.Connection) -> None:
        nonlocal num_commits
        num_commits += 1
        await commit(self)

    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    core = CoordinatorCore(ManualClock(), store)
    monkeypatch.setattr(aiosqlite.Connection, "commit", counting)
    keys = [f"{number:064x}" for number in range(50)]
    await asyncio.gather(*(core.heartbeat(key, replace(REPORT, node_id=key)) for key in keys))
    num_stored = len((await store.load()).members)
    await store.close()
    assert num_commits <= 3  # the first, all others, and the advice
    assert num_stored == len(keys)


async def test_who_writes_for_others_and_is_cancelled_takes_none_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteCoordinatorStore.open(tmp_path / "c.sqlite")
    core = CoordinatorCore(ManualClock(), store)
    keys = [f"{number:064x}" for number in range(4)]
    transact, writing = SqliteCoordinatorStore._transact, list[asyncio.Task[Any]]()

    async def cancelling(self: SqliteCoordinatorStore, statements: Any) -> None:
        if len(statements[0][1]) == 3:  # the others wait in it
            monkeypatch.undo()
            writing[1].cancel()
            writing[2].cancel()
        await transact(self, statements)

    monkeypatch.setattr(SqliteCoordinatorStore, "_transact", cancelling)
    writing += [asyncio.create_task(core.heartbeat(key, replace(REPORT, node_id=key))) for key in keys]
    results = await asyncio.gather(*writing, return_exceptions=True)
    stored = {member.node_id for member in (await store.load()).members}
    await store.close()
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, True, True, False]
    assert stored == {keys[0], keys[3]} and not store._reports


@pytest.mark.parametrize("is_listing", [True, False])
async def test_the_page_says_who_is_listed_and_who_is_a_newcomer(is_listing: bool) -> None:
    core = CoordinatorCore(ManualClock(), parties=listing_ada() if is_listing else None)
    for node_id in (ADA, EVE):
        await core.heartbeat(node_id, replace(REPORT, node_id=node_id))
    status = Dashboard(core, "run", str, Telemetry("coordinator")).status()
    standing = {member["node_id"]: member["standing"] for member in status["members"]}
    assert standing == ({ADA: "member", EVE: "newcomer"} if is_listing else {ADA: "", EVE: ""})


async def test_the_page_says_how_each_node_is_reached_and_no_address() -> None:
    core, relay = CoordinatorCore(ManualClock()), "c" * 64
    endpoints = {
        ADA: ("10.7.0.1:7700",),
        EVE: (f"10.7.0.1:7700/{ADA}", f"10.7.0.2:443/{relay}", f"10.7.0.9:7700/{ADA}"),
        relay: (),
    }
    for node_id, known in endpoints.items():
        name = "ada<b>" if node_id == ADA else ""
        await core.heartbeat(node_id, replace(REPORT, node_id=node_id, name=name, endpoints=known))
    served = {"reservations": 3, "connections": 4, "bytes": 5}
    dashboard = Dashboard(core, "run", str, Telemetry("coordinator"), relayed=lambda: served)
    status = dashboard.status()
    page = dashboard._render(status, ())
    assert "10.7.0" not in page and "10.7.0" not in json.dumps(status)
    reached = {member["node_id"]: member["reached"] for member in status["members"]}
    assert reached == {ADA: "dialled", EVE: f"through ada<b>, {relay[:8]}", relay: ""}
    assert f"through ada&lt;b&gt;, {relay[:8]}</td>" in page
    metrics = dashboard._measure().decode()
    assert "coordinator_relayed_nodes 3.0" in metrics and "coordinator_relayed_bytes_total 5.0" in metrics


async def test_the_page_has_no_field_that_its_figures_lack() -> None:
    core = CoordinatorCore(ManualClock())
    await core.heartbeat(EVE, replace(REPORT, node_id=EVE, edges=(EDGE,)))
    environments = [EnvironmentConfig(name="sums", kind="calculator")]
    dashboard = Dashboard(core, "run", str, Telemetry("coordinator"), environments)
    page = dashboard._render(dashboard.status(), ())
    assert "sums (replayable)" in page
    assert f"<td>{ADA[:8]}</td><td>1</td><td>0.20</td>" in page


async def test_the_page_shows_a_thousand_members_and_what_they_are_called_is_no_markup() -> None:
    core = CoordinatorCore(ManualClock())
    keys = [f"{number:064x}" for number in range(1000)]
    for number, key in enumerate(keys):
        edges = (replace(EDGE, source=keys[number - 1]), replace(EDGE, source=keys[number // 2]))
        name = f"<script>alert({number})</script>"
        await core.heartbeat(key, replace(REPORT, node_id=key, name=name, edges=edges if number else ()))
    dashboard = Dashboard(core, "run", str, Telemetry("coordinator"))
    page = dashboard._render(dashboard.status(), ())
    assert page.count("<circle") >= 1000 and page.count('<td class="left good">live</td>') == 1000
    assert "<script>alert" not in page and not re.search(r"<[^>]* (on\w+|style)=", re.sub(r'"[^"]*"', "", page))
    assert dashboard._page_of("/page.js") is not None and dashboard._page_of("/style.css") is not None


async def test_the_course_of_a_run_stays_small_and_reaches_back_to_its_beginning() -> None:
    clock = ManualClock()
    core, history = CoordinatorCore(clock), History()
    await core.heartbeat(ADA, replace(REPORT, evaluations={"sums/held_out": 0.5, "sums/all": 0.9}))
    for _ in range(10 * MAX_MOMENTS):
        history.note(core)
        clock.advance(history.every_s)
    assert len(history.moments) <= MAX_MOMENTS and history.every_s > 10.0
    first = history.moments[0]
    assert (first.num_live, first.reward, first.held_out) == (1, 0.5, 0.5)
    gaps = {later.at_s - each.at_s for each, later in zip(history.moments, history.moments[1:], strict=False)}
    assert gaps == {history.every_s}, "evenly apart"


async def test_figures_as_large_as_the_wire_lets_in_do_not_end_the_page() -> None:
    core, history = CoordinatorCore(ManualClock()), History()
    for reward in (3.4e38, -3.4e38, 0.0):
        report = replace(REPORT, reward_mean=reward, tokens_per_s=3.4e38, evaluations={"sums/held_out": -reward})
        read = heartbeat_to_report(report_to_heartbeat(report), ADA)
        assert read is not None
        await core.heartbeat(ADA, read)
        history.note(core)
    dashboard = Dashboard(core, "run", str, Telemetry("coordinator"))
    page = dashboard._render(dashboard.status(), history.moments)
    assert page.count("<svg") >= 4 and "nan" not in re.sub(r"<script.*", "", page).lower()


async def test_free_keys_do_not_move_the_course_of_a_run_that_lists_members() -> None:
    core, history = CoordinatorCore(ManualClock(), parties=listing_ada()), History()
    for key, reward in ((ADA, 0.5), *((f"{number:064x}", 9.0) for number in range(5))):
        await core.heartbeat(key, replace(REPORT, node_id=key, reward_mean=reward))
    history.note(core)
    assert (history.moments[0].num_live, history.moments[0].reward) == (6, 0.5)
