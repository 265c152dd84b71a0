"""The agent of a node alone: counting what was asked, and a disk that is full at the worst moment."""

import asyncio
import errno
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scenes import in_virtual_time
from workers import make_report

from swarm.config import LearnerConfig, NodeConfig, ReplayConfig
from swarm.errors import ConfigError, Unauthenticated, Unavailable
from swarm.events import DiskFull, DrawsAbandoned, Event, GroupsDrawn, events_of
from swarm.exchange.agent import KEPT_AGES, Agent
from swarm.loops import run_agent
from swarm.loops.own_advert import own_report
from swarm.loops.supervise import supervise
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import ScriptedVerifier, make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advice, EdgeReport, NodeReport, PolicyVersion, RolloutGroup, StepReport
from swarm.wire.reports import heartbeat_to_report, report_to_heartbeat

IDENTITY, PEER = make_identity(1), make_identity(2)
HEAD = PolicyVersion(policy_id=IDENTITY.node_id, step=0)


class Bench:
    """An agent, its disk, and what it told."""

    def __init__(self, deterministic: bool = False, checkpoint_every: int = 10) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.is_full = False
        self.store = MemoryGroupStore(self.clock, 2**24, self._before_write)
        self.events: list[Event] = []
        self.config = NodeConfig(
            replay=ReplayConfig(local_groups=2, external_groups=0),
            learner=LearnerConfig(deterministic=deterministic, checkpoint_every=checkpoint_every),
        )
        self.agent = self.start()

    def start(self) -> Agent:
        """A new agent over the same disk."""
        context = make_context(self.config, IDENTITY, clock=self.clock, emit=self.events.append)
        return make_agent(context, self.store, verifier=ScriptedVerifier(crashes_on="CRASH"))

    def count(self, kind: type[Event]) -> int:
        return len(events_of(kind, self.events))

    async def put(self, *texts: str, task_id: int = 7) -> None:
        await self.agent.local.put(
            make_group(IDENTITY.node_id, task_id=task_id, texts=texts or (str(task_id % 10), "no"))
        )

    def _before_write(self, _: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left")


class FlakyCoordinator:
    """Answers, or is away; its watch is always broken."""

    def __init__(self) -> None:
        self.is_away = True
        self.num_asked = 0

    async def heartbeat(self, report: NodeReport) -> Advice:
        self.num_asked += 1
        if self.is_away:
            raise Unavailable("nobody there")
        return Advice()

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None: ...

    async def leave(self) -> None: ...

    async def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        raise Unavailable("nobody there")
        yield HEAD


def test_a_coordinator_that_goes_and_comes_is_told_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench, coordinator = Bench(), FlakyCoordinator()
        running = asyncio.create_task(run_agent(bench.agent, None, None, coordinator, random.Random(0)))  # type: ignore[arg-type]
        for is_away in (True, False, True, False):
            coordinator.is_away, before = is_away, coordinator.num_asked
            await asyncio.sleep(100.0)
            assert coordinator.num_asked > before + 5
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    caplog.set_level("INFO")
    run_virtual(main())
    told = [record.message for record in caplog.records if "coordinator" in record.message]
    assert told == 2 * ["the coordinator does not answer; the node goes on without it", "the coordinator answers again"]
    assert "loop interrupted" not in [record.message for record in caplog.records]


def test_a_coordinator_that_refuses_a_node_is_told_though_it_was_away_before(caplog: pytest.LogCaptureFixture) -> None:
    class RefusingCoordinator(FlakyCoordinator):
        async def heartbeat(self, report: NodeReport) -> Advice:
            if self.is_away and self.num_asked >= 3:
                self.num_asked += 1
                raise Unauthenticated("run demo denies this node")
            return await super().heartbeat(report)

    async def main() -> None:
        bench, coordinator = Bench(), RefusingCoordinator()
        running = asyncio.create_task(run_agent(bench.agent, None, None, coordinator, random.Random(0)))  # type: ignore[arg-type]
        await asyncio.sleep(300.0)
        assert bench.agent.coordinator_view.refusal == "run demo denies this node"
        coordinator.is_away = False
        await asyncio.sleep(100.0)
        assert bench.agent.coordinator_view.refusal == ""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    caplog.set_level("INFO")
    run_virtual(main())
    told = [record.message for record in caplog.records if "coordinator" in record.message]
    assert ["does not answer" in told[0], "refuses this node" in told[1], told[2:]] == [
        True,
        True,
        ["the coordinator answers again"],
    ]


def test_a_loop_that_goes_on_failing_is_told_once_and_again_after_it_worked(caplog: pytest.LogCaptureFixture) -> None:
    works_s = iter([0.0, 0.0, 0.0, 60.0, 0.0, 0.0])

    async def loop() -> None:
        await asyncio.sleep(next(works_s, 1e6))
        raise Unavailable("nobody there")

    async def main() -> None:
        async with asyncio.timeout(1000.0):
            await supervise("ledger", loop, Bench().agent, random.Random(0))

    caplog.set_level("INFO")
    with pytest.raises(TimeoutError):
        run_virtual(main())
    assert [record.message for record in caplog.records] == 2 * ["loop interrupted"]


def report_of(draw_step: int, step: int, was_skipped: bool = False) -> StepReport:
    version = PolicyVersion(policy_id=IDENTITY.node_id, step=step)
    return make_report(version, was_skipped=was_skipped, draw_step=draw_step)


def test_a_disk_that_is_full_while_a_draw_is_journalled_loses_no_group_and_ends_the_wait_by_itself() -> None:
    async def main(deterministic: bool) -> None:
        bench = Bench(deterministic)
        agent = bench.agent
        await bench.put(task_id=7)
        await bench.put(task_id=17)
        bench.is_full = True
        drawing = asyncio.create_task(agent.local.draw(HEAD))
        await asyncio.sleep(30.0)
        assert not drawing.done()
        assert bench.count(DiskFull) == 1
        assert bench.count(GroupsDrawn) == 0
        bench.is_full = False
        draw = await drawing
        assert [drawn.scored.group.task_id for drawn in draw.groups] == [7, 17]
        assert [step for step, _ in await bench.store.journal(0)] == [1]
        await agent.local.publish(PolicyVersion(policy_id=IDENTITY.node_id, step=1))
        await agent.local.report_step(report_of(draw_step=1, step=1))
        assert await agent.local.wait_capacity() > 0
        await bench.put(task_id=27)
        await bench.put(task_id=37)
        assert (await agent.local.draw(HEAD)).step == 2

    run_virtual(main(deterministic=True))
    run_virtual(main(deterministic=False))


@in_virtual_time
async def test_a_kill_while_the_disk_is_full_loses_no_group_either() -> None:
    bench = Bench()
    await bench.put(task_id=7)
    await bench.put(task_id=17)
    bench.is_full = True
    drawing = asyncio.create_task(bench.agent.local.draw(HEAD))
    await asyncio.sleep(5.0)
    drawing.cancel()
    await asyncio.gather(drawing, return_exceptions=True)
    bench.is_full = False
    again = bench.start()
    await again.restore()
    draw = await again.local.draw(HEAD)
    assert [(drawn.scored.group.task_id, drawn.use) for drawn in draw.groups] == [(7, 1), (17, 1)]


@in_virtual_time
async def test_groups_that_an_earlier_release_let_in_are_not_learned_from_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pill(task_id: int, now_s: float) -> RolloutGroup:
        group = make_group(PEER.node_id, task_id=task_id, created_at_s=now_s)
        first, *others = group.rollouts
        assert first.trace is not None
        ids = np.concatenate([np.full(40, 5, np.int32), first.trace.token_ids])
        trace = replace(first.trace, token_ids=ids, action_mask=ids != 5, logprobs=None, turn_ids=np.int16(0) * ids)
        bare = [replace(r, trace=replace(r.trace, logprobs=None)) for r in others if r.trace is not None]
        return replace(group, rollouts=(replace(first, trace=trace), *bare))

    bench = Bench()
    bench.config = bench.config.model_copy(update={"replay": ReplayConfig(local_groups=2, external_groups=2)})
    agent = bench.agent = bench.start()
    await bench.put(task_id=7)
    await bench.put(task_id=17)
    with monkeypatch.context() as earlier:
        earlier.setattr("swarm.exchange.checks.admission_checks.check_form", lambda *_: None)
        drawn, waiting = [make_sealed(pill(task_id, bench.clock.now_s()), PEER) for task_id in (7, 18)]
        await agent.ingest.receive(drawn, via=PEER.node_id)
        draw = await agent.local.draw(HEAD)
        await agent.ingest.receive(waiting, via=PEER.node_id)
    assert drawn.digest in {each.scored.digest for each in draw.groups} and waiting.digest in agent.replay.digests
    again = bench.start()
    await again.restore()
    assert "stored groups are not learned from" in caplog.text
    (draw,) = await again.local.redraw(1)
    assert len(draw.groups) == 2
    assert waiting.digest not in again.replay.digests


@in_virtual_time
async def test_questions_are_counted_over_failures_and_restarts_and_never_go_back() -> None:
    bench = Bench()
    assert await bench.agent.local.num_asked() == 0
    await bench.put(task_id=7)
    await bench.put("CRASH", "8")
    assert await bench.agent.local.num_asked() == 2
    await bench.put(task_id=27)
    assert await bench.agent.local.num_asked() == 3
    bench.agent = bench.start()
    await bench.agent.restore()
    assert await bench.agent.local.num_asked() == 2  # what could not be scored left no trace
    await bench.store.forget(bench.clock.now_s() + 1.0, 0)
    bench.agent = bench.start()
    await bench.agent.restore()
    assert await bench.agent.local.num_asked() == 2


@in_virtual_time
async def test_a_learner_of_many_sources_still_makes_reports_that_the_coordinator_takes() -> None:
    bench = Bench()
    for number in range(100):
        edge = EdgeReport(
            source=make_identity(number).node_id,
            num_groups=1,
            age_mean_steps=1.0,
            ess_share=0.5,
            mismatch_kl=0.1,
            reward_mean=0.5,
        )
        await bench.agent.local.report_step(replace(report_of(draw_step=number + 1, step=number + 1), edges=(edge,)))
    report = own_report(bench.agent, tokens_per_s=1.0)
    assert report.edges[-1].source == make_identity(99).node_id
    assert heartbeat_to_report(report_to_heartbeat(report), IDENTITY.node_id) == report


@in_virtual_time
async def test_tidying_keeps_what_the_last_two_checkpoints_would_draw_again() -> None:
    bench = Bench(checkpoint_every=2)
    agent = bench.agent
    assert await agent.local.redraw(1) == []
    for step in range(1, 8):
        await bench.put(task_id=100 + 10 * step)
        await bench.put(task_id=105 + 10 * step)
        draw = await agent.local.draw(HEAD)
        await agent.local.publish(PolicyVersion(policy_id=IDENTITY.node_id, step=step))
        await agent.local.report_step(report_of(draw_step=draw.step, step=step))
        if step % 2 == 0:
            await agent.local.report_checkpoint(draw.step + 1)
    await asyncio.sleep(KEPT_AGES * bench.config.replay.max_age_s + 1.0)
    assert await agent.tidy(max_bytes=10**9) == 8  # of draws 1 to 4; checkpoints were made after 4 and 6
    assert [draw.step for draw in await agent.local.redraw(5)] == [5, 6, 7]
    assert await agent.tidy(max_bytes=0) == 6  # a full store would stop the learner before its next checkpoint


@in_virtual_time
async def test_a_checkpoint_that_was_not_written_keeps_the_draws_of_the_ones_before() -> None:
    bench = Bench(checkpoint_every=2)
    agent = bench.agent
    assert await agent.local.redraw(1) == []
    for step in range(1, 10):
        await bench.put(task_id=100 + 10 * step)
        await bench.put(task_id=105 + 10 * step)
        draw = await agent.local.draw(HEAD)
        await agent.local.report_step(report_of(draw_step=draw.step, step=step))
        if step % 2 == 0:
            await agent.local.report_checkpoint(draw.step + 1, "" if step <= 4 else "No space left on device")
    assert bench.count(DiskFull) == 2
    await asyncio.sleep(KEPT_AGES * bench.config.replay.max_age_s + 1.0)
    assert await agent.tidy(max_bytes=10**9) == 4  # of draws 1 and 2
    again = bench.start()
    await again.restore()
    assert [draw.step for draw in await again.local.redraw(3)] == [3, 4, 5, 6, 7, 8, 9]


@in_virtual_time
async def test_a_learner_without_its_checkpoints_does_not_begin_again_in_silence() -> None:
    bench = Bench(checkpoint_every=2)
    assert await bench.agent.local.redraw(1) == []
    for next_draw in (3, 5, 7):
        await bench.agent.local.report_checkpoint(next_draw)
    for from_step, is_refused in ((7, False), (5, False), (3, True), (1, True)):
        agent = bench.start()
        await agent.restore()
        if is_refused:
            with pytest.raises(ConfigError, match=r"checkpoints: gone, .*put it back, or move groups.sqlite away"):
                await agent.local.redraw(from_step)
        else:
            await agent.local.redraw(from_step)


def test_a_journal_behind_the_checkpoint_goes_on_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = Bench()
        assert await bench.agent.local.redraw(491) == [], "the store is new, and the checkpoint is not"
        await bench.put(task_id=107)
        await bench.put(task_id=117)
        assert (await bench.agent.local.draw(HEAD)).step == 491

    run_virtual(main())
    assert "going on from the checkpoint alone" in caplog.text


@in_virtual_time
async def test_tidying_keeps_what_waits_for_a_draw() -> None:
    bench = Bench()
    for task_id in (107, 117, 127, 137):
        await bench.put(task_id=task_id)
    assert await bench.agent.tidy(max_bytes=0) == 0
    drawn = [await bench.agent.local.draw(HEAD)]
    assert [draw.groups for draw in await bench.agent.local.redraw(1)] == [draw.groups for draw in drawn]
    assert not bench.count(DrawsAbandoned)


@in_virtual_time
async def test_a_resume_whose_groups_are_gone_says_so_and_goes_on_with_other_draws() -> None:
    async def step(bench: Bench, number: int) -> int:
        await bench.put(task_id=100 + 10 * number)
        await bench.put(task_id=105 + 10 * number)
        draw = await bench.agent.local.draw(HEAD)
        await bench.agent.local.report_step(report_of(draw_step=draw.step, step=number))
        return draw.step

    async def resume(bench: Bench) -> list[int]:
        bench.agent = bench.start()
        await bench.agent.restore()
        return [draw.step for draw in await bench.agent.local.redraw(1)]

    bench = Bench()
    assert await bench.agent.local.redraw(1) == []
    assert [await step(bench, number) for number in (1, 2, 3)] == [1, 2, 3]
    assert await resume(bench) == [1, 2, 3] and not bench.count(DrawsAbandoned)
    assert await bench.agent.tidy(max_bytes=0) == 6
    assert await resume(bench) == []
    assert bench.events[-1] == DrawsAbandoned(from_step=1, first=1, last=3)
    assert await step(bench, 4) == 4, "no other draw may pass for one that was made"
    assert await resume(bench) == [4], "the second resume is exact again"
    assert bench.count(DrawsAbandoned) == 1


@in_virtual_time
async def test_a_worker_that_resumes_alone_is_not_handed_an_abandoned_draw() -> None:
    bench = Bench()
    await bench.put(task_id=107)
    await bench.put(task_id=117)
    assert (await bench.agent.local.draw(HEAD)).step == 1
    assert await bench.agent.tidy(max_bytes=0) == 2
    assert await bench.agent.local.redraw(1) == []
    await bench.put(task_id=127)
    await bench.put(task_id=137)
    assert (await bench.agent.local.draw(HEAD)).step == 2


@in_virtual_time
async def test_a_step_that_was_skipped_is_no_progress_and_says_that_every_source_is_set_aside() -> None:
    agent = Bench().agent
    before = agent.last_step_at_s
    await asyncio.sleep(5.0)
    figures = {"guard_idle_draws": 1.0, "mismatch_kl_k3": 0.113, "ess_share": 0.4}
    await agent.local.report_step(replace(report_of(1, 1, was_skipped=True), diagnostics=figures))
    assert agent.last_step_at_s == before
    assert agent.local.idle_figures == figures
    figures |= {"guard_idle_draws": 5.0, "guard_groups_spared": 1.0}
    await agent.local.report_step(replace(report_of(2, 2), diagnostics=figures))
    assert agent.last_step_at_s > before
    assert agent.local.idle_figures["guard_idle_draws"] == 5.0
    agent.own_groups.since_step.num_put = 5
    await agent.local.report_step(report_of(3, 3))
    assert not agent.local.idle_figures and agent.own_groups.since_step.num_put == 0


@in_virtual_time
async def test_in_turn_there_is_no_capacity_once_a_draw_is_possible_and_until_its_step_was_made() -> None:
    bench = Bench(deterministic=True)
    agent = bench.agent
    await bench.put(task_id=7)
    assert agent.local.capacity() > 0
    await bench.put(task_id=17)
    assert agent.local.capacity() == 0
    await agent.local.draw(HEAD)
    assert agent.local.capacity() == 0
    await agent.local.report_step(report_of(draw_step=1, step=0, was_skipped=True))
    assert agent.local.capacity() > 0
    await bench.put("7", "7", task_id=47)
    await bench.put("7", "7", task_id=57)  # nothing but groups without signal
    made = agent.own_groups.since_step
    assert (made.num_put, made.num_with_signal) == (4, 2)
    assert agent.local.capacity() == 0
    drawing = asyncio.create_task(agent.local.draw(HEAD))
    await asyncio.sleep(0.1)
    assert not drawing.done()
    assert agent.local.capacity() > 0
    drawing.cancel()
