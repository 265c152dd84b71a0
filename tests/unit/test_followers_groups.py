"""Groups of our own lineage that another node made: admission, draw, restart, and events."""

import asyncio
import logging
from dataclasses import replace

import pytest
from scenes import in_virtual_time
from waits import until
from workers import make_report

from swarm.config import NodeConfig, ReplayConfig, WeightsConfig
from swarm.events import Event, GroupAdmitted, GroupsDrawn, Kind, VersionPublished, events_of
from swarm.exchange.agent import Agent
from swarm.exchange.draw_journal import SAID_AFTER_S
from swarm.loops.agent_loops import credit_loop
from swarm.loops.own_advert import own_advert
from swarm.report.invariants import Invariants
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import (
    Advert,
    Draw,
    PolicyVersion,
    RefusalReason,
    Refused,
    RolloutGroup,
    ScoredGroup,
    VersionSpan,
)

TRAINER, FOLLOWER = make_identity(1), make_identity(2)
MAX_WINDOW = 4  # two steps of two groups
CONFIG = NodeConfig(
    replay=ReplayConfig(local_groups=2, external_groups=2, max_age_steps=3), weights=WeightsConfig(publish=True)
)


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy_id=TRAINER.node_id, step=step, digest=bytes([step]) * 32)


def by_follower(task_id: int, *steps: int) -> RolloutGroup:
    """A group of the follower made in flight over those versions of the trainer."""
    group = make_group(FOLLOWER.node_id, task_id=task_id)  # two tokens each, the end one of them
    spans = tuple(VersionSpan(start=start, version=version(step)) for start, step in enumerate(steps))
    rollouts = tuple(replace(r, trace=replace(r.trace, spans=spans)) for r in group.rollouts if r.trace is not None)
    return replace(group, policy_id=TRAINER.node_id, rollouts=rollouts)


class Bench:
    """The trainer's agent over one disk, and its events."""

    def __init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.store = MemoryGroupStore(self.clock, 2**24)
        self.events: list[Event] = []
        self.agent = self.start()

    def start(self) -> Agent:
        return make_agent(make_context(CONFIG, TRAINER, clock=self.clock, emit=self.events.append), self.store)

    async def receive(self, group: RolloutGroup) -> ScoredGroup | Refused:
        now = replace(group, created_at_s=self.clock.now_s())
        return await self.agent.ingest.receive(make_sealed(now, FOLLOWER), via=FOLLOWER.node_id)

    async def draw_two(self) -> Draw:
        """Of versions 0 to 2 that were published: one group in flight over two of them, one of the newest."""
        for step in range(3):
            await self.agent.local.publish(version(step))
        for group in (by_follower(7, 0, 1), by_follower(8, 2)):
            assert isinstance(await self.receive(group), ScoredGroup)
        return await self.agent.local.draw(version(2))

    def emitted(self, kind: type[Kind]) -> list[Kind]:
        return events_of(kind, self.events)


@in_virtual_time
async def test_a_trainer_whose_followers_leave_out_log_probs_says_why_it_makes_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    await bench.agent.local.publish(version(0))
    drawing = asyncio.create_task(bench.agent.local.draw(version(0)))
    for task_id in range(7, 11):
        group = by_follower(task_id, 0)
        traces = [replace(each.trace, logprobs=None) for each in group.rollouts if each.trace is not None]
        rollouts = tuple(replace(r, trace=trace) for r, trace in zip(group.rollouts, traces, strict=True))
        assert isinstance(await bench.receive(replace(group, rollouts=rollouts)), ScoredGroup)
        await asyncio.sleep(SAID_AFTER_S / 2)
    await until(lambda: bool(caplog.records), "the warning")
    assert [record.message.partition(";")[0] for record in caplog.records if record.levelno == logging.WARNING] == [
        "no step: the groups that wait are of newcomers, or lack log-probs, and fill an eighth of a draw at most"
    ]
    drawing.cancel()


@in_virtual_time
async def test_a_draw_waits_for_the_own_lineage_and_takes_what_followers_made() -> None:
    bench = Bench()
    draw = await bench.draw_two()
    assert [(d.age_steps, d.in_flight_steps) for d in draw.groups] == [(2, 1), (0, 0)]
    journal = bench.agent.journal
    assert (journal.num_local, journal.num_external) == (0, 0), "nothing is learned from yet"
    report = make_report(version(3), draw_step=draw.step, num_local=1)
    await bench.agent.local.report_step(report)
    assert (journal.num_local, journal.num_external, journal.num_set_aside) == (1, 0, 1)
    await bench.agent.local.report_step(report)
    assert (journal.num_local, journal.num_set_aside) == (1, 1), "once"
    drawn = bench.emitted(GroupsDrawn)[0].groups
    assert [(g.is_own_policy, g.producer, g.in_flight_steps) for g in drawn] == [
        (True, FOLLOWER.node_id, 1),
        (True, FOLLOWER.node_id, 0),
    ]
    assert bench.emitted(GroupAdmitted)[0].versions == ((0, "00" * 8), (1, "01" * 8))


@in_virtual_time
async def test_after_a_restart_the_draw_is_made_again_and_followers_are_known_as_such() -> None:
    bench = Bench()
    draw = await bench.draw_two()
    await bench.receive(by_follower(9, 1))
    bench.agent = bench.start()
    await bench.agent.restore()
    assert bench.agent.replay.num_local == 1 and bench.agent.replay.num_external == 0
    await bench.agent.local.publish(version(2))
    again = await bench.agent.local.redraw(1)
    assert [d.scored.digest for d in again[0].groups] == [d.scored.digest for d in draw.groups]
    assert isinstance(await bench.receive(by_follower(17, 1, 2)), ScoredGroup), "named by a stored group"


@in_virtual_time
async def test_the_invariants_accept_the_run_and_not_one_with_a_version_that_was_not_published() -> None:
    bench = Bench()
    await bench.draw_two()
    for unpublished in ((), (1,)):
        invariants = Invariants()
        for event in bench.events:
            if not (isinstance(event, VersionPublished) and event.step in unpublished):
                invariants.check(TRAINER.node_id, event)
        invariants.finish({})
        assert invariants.hold == (not unpublished), invariants.violations


@in_virtual_time
async def test_a_follower_cannot_make_the_groups_of_others_look_old() -> None:
    bench = Bench()
    await bench.agent.local.publish(version(0))
    refused = await bench.receive(by_follower(7, 200))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.BAD_VERSION
    assert bench.agent.peers.head_of(TRAINER.node_id) == version(0) and bench.agent.peers.heads == {}


@in_virtual_time
async def test_a_group_of_a_third_lineage_needs_a_known_head_and_moves_none() -> None:
    bench = Bench()
    other = "cd" * 32
    group = replace(by_follower(7, 3), policy_id=other)
    spans = (VersionSpan(start=0, version=replace(version(3), policy_id=other)),)
    rollouts = tuple(replace(r, trace=replace(r.trace, spans=spans)) for r in group.rollouts if r.trace)
    group = replace(group, rollouts=rollouts)
    refused = await bench.receive(group)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNKNOWN_HEAD
    bench.agent.peers.observe([_advert(other, 4)])
    scored = await bench.receive(group)
    assert isinstance(scored, ScoredGroup) and not scored.is_own_policy(TRAINER.node_id)
    assert bench.agent.peers.heads[other].step == 4 and bench.agent.replay.num_external == 1


@in_virtual_time
async def test_a_follower_sends_no_more_than_it_has_credit_for_and_is_not_blamed_for_trying() -> None:
    bench = Bench()
    await bench.agent.local.publish(version(0))
    await asyncio.sleep(CONFIG.replay.max_age_s + 1)
    credit_ledger = bench.agent.credit_ledger
    refused = await bench.receive(by_follower(1, 0))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_CREDIT
    credit_ledger.open(FOLLOWER.node_id, window=65536)
    credit_ledger.grant(100)
    results = await asyncio.gather(*(bench.receive(by_follower(task_id, 0)) for task_id in range(2, 10)))
    assert sum(isinstance(result, ScoredGroup) for result in results) == 1, "many at a time are no way around it"
    assert bench.agent.replay.num_local == 1
    credit_ledger.grant(100)
    assert credit_ledger.num_outstanding == 2, "it delivered"
    assert bench.agent.reputation.is_allowed(FOLLOWER.node_id) and bench.agent.ingest.refusals == {
        RefusalReason.NO_CREDIT: 8
    }


@in_virtual_time
async def test_after_a_restart_groups_with_credit_of_before_are_taken_up_to_a_window() -> None:
    bench = Bench()
    await bench.agent.local.publish(version(0))
    bench.agent = bench.start()
    await bench.agent.local.publish(version(0))
    results = [await bench.receive(by_follower(task_id, 0)) for task_id in range(8)]
    assert [isinstance(result, ScoredGroup) for result in results] == [True] * MAX_WINDOW + [False] * 4


@in_virtual_time
async def test_a_group_that_is_sent_again_after_a_restart_and_is_too_old_uses_no_credit() -> None:
    bench = Bench()
    for step in range(6):
        await bench.agent.local.publish(version(step))
    credit_ledger, old = bench.agent.credit_ledger, replace(by_follower(1, 0), created_at_s=bench.clock.now_s())
    await asyncio.sleep(1.0)
    line = credit_ledger.open(FOLLOWER.node_id, window=4)
    credit_ledger.grant(8)
    for group, num_delivered in ((old, 0), (replace(by_follower(2, 0), created_at_s=bench.clock.now_s()), 1)):
        refused = await bench.agent.ingest.receive(make_sealed(group, FOLLOWER), via=FOLLOWER.node_id)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_OLD
        assert line.num_delivered == num_delivered


@in_virtual_time
async def test_followers_that_hang_do_not_freeze_a_trainer_to_which_nothing_comes() -> None:
    bench = Bench()
    await bench.agent.local.publish(version(0))
    credit_ledger = bench.agent.credit_ledger
    for peer in ("a", "b"):
        credit_ledger.open(peer, window=65536)
        for _ in range(3):
            credit_ledger.record_delivery(peer, is_admitted=True)  # as an honest one, before it hangs
    credit_ledger.grant(100)
    assert credit_ledger.num_outstanding == 2 * MAX_WINDOW and bench.agent.local.capacity() == 0
    loop = asyncio.create_task(credit_loop(bench.agent))
    async with asyncio.timeout(CONFIG.replay.max_age_s):
        assert await bench.agent.local.wait_capacity() > 0
    loop.cancel()
    credit_ledger.grant(100)
    assert credit_ledger.num_outstanding == 0, "they are tried anew, beside the room"


def _advert(node_id: str, step: int) -> Advert:
    own = own_advert(Bench().agent)
    return replace(own, node_id=node_id, head=PolicyVersion(policy_id=node_id, step=step, digest=bytes(32)))
