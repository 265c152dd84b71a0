"""Answers of a coordinator to many callers at once, through its crashes, are those of one ledger; and can be others."""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import pytest
from waits import until

from coordinator.core import CoordinatorCore
from coordinator.head_watches import HeadWatches
from coordinator.ledger import Ledger, LedgerAnswer, LedgerEntry, LedgerLineage
from swarm.clock import ManualClock, SystemClock
from swarm.config import CoordinatorLink
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.coordinator_client import GrpcCoordinatorClient
from swarm.report.invariants import COORDINATED
from swarm.simulate.coordinator_history import CoordinatorHistory, UnrulyOwner
from swarm.simulate.virtual.coordinator import CoreClient, SlowStore, VirtualCoordinator
from swarm.simulate.virtual.faults import Crash, FaultPlan
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import VirtualRun, run_seed
from swarm.testing.builders import make_report
from swarm.types import Advice, NodeReport, PolicyVersion
from swarm.wire.reports import report_to_heartbeat
from swarm.wire.rollout_groups import version_to_message
from swarm.wire.run_manifest import RunManifest
from swarm.wire.v1 import coordinator_service_pb2 as pb
from tests.worlds.one_ledger import violations


def run_with(core: type[CoordinatorCore] = CoordinatorCore, seed: int = 2) -> VirtualRun:
    """A coordinator with a slow disk, which crashes in the middle."""
    plan = FaultPlan(
        latency_s=0.05,
        crashes=(Crash(node=1, at_s=9.0, down_s=2.0),),
        coordinator_crash=Crash(node=-1, at_s=10.7, down_s=3.0),
        coordinator_write_s=1.0,
    )
    return run_seed(seed, 4, 8, plan, Parts(coordinator=core, judge_coordinator=violations))


def test_every_answer_of_a_coordinator_that_crashes_is_that_of_one_ledger() -> None:
    run = run_with()
    assert run.invariants.hold, run.invariants.violations
    verdict = next(verdict for verdict in run.invariants.verdicts() if verdict.name == COORDINATED)
    assert int(verdict.detail.split()[0]) > 50, "hardly anybody called"


class HastyCore(CoordinatorCore):
    """Acknowledges versions, and shows them, before they are on its disk."""

    async def record_versions(self, node_id: str, versions: Sequence[PolicyVersion]) -> list[LedgerAnswer]:
        judgement = self.ledger.judge(node_id, versions, self.clock.now_s())
        self.ledger.apply(node_id, judgement)
        for entry in judgement.entries:
            self.watches.offer(entry.version)
        writing = asyncio.ensure_future(self._write_later(judgement.entries))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return judgement.answers

    async def _write_later(self, entries: list[LedgerEntry]) -> None:
        await asyncio.sleep(3.0)
        if not cast(SlowStore, self.store).is_dead:
            await self.store.add_versions(entries)


class ForgetfulCore(CoordinatorCore):
    """Loses the newest lines of its ledger when it starts again."""

    async def restore(self) -> None:
        await super().restore()
        entries = (await self.store.load()).versions
        self.ledger = Ledger()
        self.ledger.restore(entries[:-6])


class LonelyCore(CoordinatorCore):
    """Forgets who is a member when it starts again."""

    async def restore(self) -> None:
        await super().restore()
        self.ledger.restore([])
        self.membership = type(self.membership)(self.membership.lease_s)


class LenientLineage(LedgerLineage):
    """Takes another digest for a step without a rewind."""

    def judge(self, owner: str, version: PolicyVersion, now_s: float) -> LedgerAnswer:
        answer = super().judge(owner, version, now_s)
        if answer.accepted or "fork" not in answer.reason:
            return answer
        entry = LedgerEntry(version=version, branch=self.branch, parent=version.step - 1, at_s=now_s)
        return LedgerAnswer(accepted=True, entry=entry)


class LenientLedger(Ledger):
    """A ledger of such lineages."""

    def _new_lineage(self) -> LedgerLineage:
        return LenientLineage(super()._new_lineage().versions)


class LenientCore(CoordinatorCore):
    """A coordinator with such a ledger."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ledger = LenientLedger()


class SleepyWatches(HeadWatches):
    """Tells every second head to nobody."""

    num_offers = 0

    def offer(self, head: PolicyVersion) -> None:
        self.num_offers += 1
        if self.num_offers % 2:
            super().offer(head)


class MuteCore(CoordinatorCore):
    """A coordinator whose watches begin without the head that is there."""

    async def watch_versions(
        self, node_id: str, policy_id: str, subnet: str = ""
    ) -> AsyncGenerator[PolicyVersion, None]:
        with self.watches.open(node_id, policy_id, subnet or node_id) as watch:
            while True:
                yield await watch.next()


class SleepyCore(CoordinatorCore):
    """A coordinator with such watches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watches = SleepyWatches()


class LateWatches(HeadWatches):
    """Tells each head once more after the next one."""

    def offer(self, head: PolicyVersion) -> None:
        loop = asyncio.get_running_loop()
        super().offer(head)
        loop.call_later(6.0, super().offer, head)


class LateCore(CoordinatorCore):
    """A coordinator with such watches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watches = LateWatches()


class StrictCore(CoordinatorCore):
    """Advises that nothing older than the present step be used."""

    async def heartbeat(self, node_id: str, report: NodeReport, subnet: str = "") -> Advice:
        await super().heartbeat(node_id, report, subnet)
        return Advice(max_age_steps=0)


@pytest.mark.parametrize(
    ("core", "what"),
    [
        (HastyCore, ""),
        (ForgetfulCore, ""),
        (LonelyCore, "is no member"),
        (LenientCore, "were answered"),
        (SleepyCore, "a watch missed"),
        (LateCore, "a watch showed"),
        (StrictCore, "an age of 0 steps"),
    ],
    ids=["durable", "restored", "members", "fork", "missed", "order", "advice"],
)
def test_a_broken_coordinator_is_found_out(core: type[CoordinatorCore], what: str) -> None:
    found = run_with(core).invariants.violations[COORDINATED]
    assert any(what in violation for violation in found), found


# --- over gRPC, through kill -9 ------------------------------------------------------------------

SERVER: Final = """
import asyncio, sys
from pathlib import Path
from coordinator.core import CoordinatorCore
from coordinator.manifest_signing import sign_next
from coordinator.service import CoordinatorServicer
from coordinator.sqlite_store import SqliteCoordinatorStore
from swarm.clock import SystemClock
from swarm.config import CoordinatorConfig, ModelConfig, NodeConfig
from swarm.process import load_or_create_identity
from swarm.wire.run_manifest import manifest_of
from swarm.wire.server import Sessions, start_server

async def main(folder, listen, max_age_steps):
    node = NodeConfig.model_validate({"model": {"source": "tiny"}, "replay": {"max_age_steps": max_age_steps}})
    config = CoordinatorConfig.model_validate({"dir": folder, "run_id": "test", "node": node})
    identity, clock = load_or_create_identity(folder / "identity.key"), SystemClock()
    signed = sign_next(config, identity, manifest_of(node, "test", "", 0.0), clock.now_s())
    core = CoordinatorCore(clock, await SqliteCoordinatorStore.open(folder / "coordinator.sqlite"))
    await core.restore()
    sessions = Sessions(identity, "test", clock)
    servicer = CoordinatorServicer(core, sessions, signed, tuple)
    server, port = await start_server(listen, sessions, [servicer.register])
    print(port, identity.node_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""


async def start_process(folder: Path, port: int, max_age_steps: int) -> tuple[asyncio.subprocess.Process, int, str]:
    """A coordinator in a process of its own, its port and fingerprint. Another age: another manifest."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(folder), f"127.0.0.1:{port}", str(max_age_steps)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    port_text, fingerprint = (await process.stdout.readline()).decode().split()
    return process, int(port_text), fingerprint


NUM_OWNERS: Final = 4
NUM_BATCHES: Final = 12  # of each owner, before the kill and after it


class RecordingClient:
    """Calls over gRPC whose answers are in a history."""

    def __init__(self, link: CoordinatorLink, history: CoordinatorHistory) -> None:
        self.identity = Identity.create()
        self._link = link
        self._history = history
        self.begin()

    def begin(self) -> None:
        """Connects anew at the next call, without the pause after failures."""
        self._client = GrpcCoordinatorClient(self._link, self.identity, "test", timeout_s=10.0)

    async def call(self, method: str, request: Any) -> Any:
        return await self._client._call(method, lambda stub: getattr(stub, method), request)

    async def hand_in(self, owner: UnrulyOwner) -> None:
        versions = owner.versions()
        with self._history.record(self.identity.node_id, versions) as call:
            request = pb.RecordVersionsRequest(versions=map(version_to_message, versions))
            answers = (await self.call("RecordVersions", request)).answers
            call.accepted = tuple(answer.accepted for answer in answers)

    async def beat(self) -> None:
        report = make_report(self.identity.node_id)
        with self._history.heartbeat(self.identity.node_id):
            await self.call("Heartbeat", report_to_heartbeat(report))

    async def read_manifest(self) -> None:
        with self._history.read_manifest() as manifest:
            answer = await self.call("GetManifest", pb.GetManifestRequest())
            manifest.serial = RunManifest.model_validate_json(answer.manifest).serial

    async def watch(self, policy_id: str) -> None:
        """Heads for ever, over as many watches as it takes."""
        while True:
            try:
                with self._history.watch(policy_id) as watch:
                    async with aclosing(self._client.watch_versions(policy_id)) as heads:  # type: ignore[type-var]
                        async for head in heads:
                            with watch.seeing(head):
                                pass
            except Unavailable:
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._client.close()


async def again_and_again(count: int, act: Callable[[], Coroutine[None, None, None]], rng: random.Random) -> None:
    """So many times with an answer."""
    while count:
        try:
            await act()
            count -= 1
        except Unavailable:
            await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, 0.02))


async def test_many_clients_of_a_killed_coordinator_see_one_ledger(tmp_path: Path) -> None:
    rng = random.Random("one ledger")
    history = CoordinatorHistory(SystemClock())
    process, port, fingerprint = await start_process(tmp_path, 0, max_age_steps=4)
    link = CoordinatorLink(address=f"127.0.0.1:{port}", fingerprint=fingerprint)
    clients = [RecordingClient(link, history) for _ in range(NUM_OWNERS)]
    owners = [UnrulyOwner(client.identity.node_id, rng) for client in clients]
    lineages = [client.identity.node_id for client in clients]
    watches = [asyncio.create_task(client.watch(rng.choice(lineages))) for client in clients]

    async def everybody() -> None:
        async with asyncio.TaskGroup() as tasks:
            for client, owner in zip(clients, owners, strict=True):

                async def act(client: RecordingClient = client, owner: UnrulyOwner = owner) -> None:
                    await client.hand_in(owner)
                    await client.read_manifest()

                tasks.create_task(again_and_again(NUM_BATCHES, act, rng))
                tasks.create_task(again_and_again(3, client.beat, rng))

    await everybody()
    more = asyncio.create_task(everybody())
    await asyncio.sleep(rng.uniform(0.05, 0.2))  # in the middle of it, wherever that is
    process.send_signal(signal.SIGKILL)
    await process.wait()
    process, _, _ = await start_process(tmp_path, port, max_age_steps=5)
    for client in clients:
        await client.close()
        client.begin()
    await more
    await until(lambda: not violations(history), "heads on their way")
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    process.terminate()
    await process.wait()
    assert history.num_calls > 2 * NUM_OWNERS * NUM_BATCHES * 2


# --- the judge itself ----------------------------------------------------------------------------


def version(step: int, byte: int = 1) -> PolicyVersion:
    return PolicyVersion(policy_id="ada", step=step, digest=bytes([byte]) * 32)


def test_a_version_that_was_never_answered_may_be_there_or_not_but_not_come_and_go() -> None:
    for seen, is_possible in (([True], True), ([False], True), ([False, True], True), ([True, False], False)):
        history = CoordinatorHistory(ManualClock())
        with history.record("ada", [version(0)]) as call:
            call.accepted = (True,)
        with pytest.raises(Unavailable), history.record("ada", [version(1)]):
            raise Unavailable("it crashed")
        for is_there in seen:
            with history.read_head("ada") as read:
                read.head = version(1) if is_there else version(0)
        assert bool(violations(history)) is not is_possible, seen


def test_a_watch_owes_its_first_head_when_the_batches_before_it_are_written() -> None:
    async def violations_while_and_after(core_type: type[CoordinatorCore]) -> tuple[list[str], list[str]]:
        """With a watch of one lineage that is opened while a batch of another is written."""
        coordinator = VirtualCoordinator(LoopClock(asyncio.get_running_loop()), write_s=1.0, core=core_type)
        ada, ben, cat = (CoreClient(coordinator, name) for name in ("ada", "ben", "cat"))
        await ada.record_versions([version(0)])
        writing = asyncio.create_task(ben.record_versions([replace(version(0), policy_id="ben")]))
        await asyncio.sleep(0)

        async def watch() -> None:
            async for _ in cat.watch_versions("ada"):
                pass

        watching = asyncio.create_task(watch())
        await asyncio.sleep(1e-3)
        early = violations(coordinator.history)
        await writing
        await asyncio.sleep(1e-3)
        late = violations(coordinator.history)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return early, late

    assert run_virtual(violations_while_and_after(CoordinatorCore)) == ([], [])
    early, late = run_virtual(violations_while_and_after(MuteCore))
    assert not early and len(late) == 1 and "a watch missed" in late[0], (early, late)


def test_a_serial_that_goes_back_is_found() -> None:
    history = CoordinatorHistory(ManualClock())
    for serial in (5, 7, 6):
        with history.read_manifest() as call:
            call.serial = serial
    assert violations(history) == ["a manifest of serial 6 after one of 7"]
