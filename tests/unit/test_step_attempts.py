"""Groups that end the learner's process, in a journal that hands them out again after every restart."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from workers import PlainLearner, make_worker

from swarm.clock import ManualClock
from swarm.config import EvaluationConfig, LearnerConfig, NodeConfig, ReplayConfig
from swarm.events import DrawsAbandoned, Event, GroupGivenUp, events_of
from swarm.exchange import step_attempts
from swarm.exchange.agent import Agent
from swarm.exchange.group_store import SqliteGroupStore
from swarm.loops.learn_loop import learn_loop
from swarm.testing.builders import make_group, make_identity, make_scored, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Digest, Draw, DrawnGroup, ScoredGroup, StepReport

IDENTITY, PEER, OTHER = make_identity(1), make_identity(2), make_identity(3)
MOST_LIVES = 12


class Death(BaseException):
    """The process is gone."""


class FakeLearner(PlainLearner):
    """Dies of what `is_deadly` says of the digests it computes."""

    def __init__(self, is_deadly: Callable[[frozenset[Digest]], bool], num_kills: int = 0) -> None:
        super().__init__(IDENTITY.node_id)
        self.is_deadly, self.num_kills = is_deadly, num_kills  # steps, not dry runs, that something unrelated ends
        self.learned, self.tried = list[frozenset[Digest]](), list[Digest]()

    def _compute(self, draw: Draw) -> frozenset[Digest]:
        digests = frozenset(drawn.scored.digest for drawn in draw.groups)
        if self.is_deadly(digests):
            raise Death
        return digests

    def dry_run(self, draw: Draw) -> None:
        (digest,) = self._compute(draw)
        self.tried.append(digest)

    def step(self, draw: Draw) -> StepReport:
        if self.num_kills:
            self.num_kills -= 1
            raise Death
        self.learned.append(self._compute(draw))
        return super().step(draw)


class Node:
    """A journal with one draw of four groups: one own, two of a peer, one of another."""

    def __init__(self, path: Path, learner: FakeLearner, num_steps: int = 1) -> None:
        self.path, self.learner = path, learner
        self.events: list[Event] = []
        self.num_deaths = 0
        self.digests: list[Digest] = []
        self.agent: Agent
        self.config = NodeConfig(
            dir=path,
            learner=LearnerConfig(num_steps=num_steps),
            evaluation=EvaluationConfig(every_steps=0),
            replay=ReplayConfig(max_reuse=2),  # so that a restart finds them in the buffer
        )

    async def open(self) -> SqliteGroupStore:
        return await SqliteGroupStore.open(self.path / "groups.sqlite", ManualClock(), 2**24)

    async def fill(self) -> None:
        store = await self.open()
        groups: list[ScoredGroup] = []
        for number, identity in enumerate((IDENTITY, PEER, PEER, OTHER)):
            group = make_group(identity.node_id, task_id=10 + number)
            sealed = make_sealed(group, identity)
            is_own = identity is IDENTITY
            groups.append(make_scored(group, digest=sealed.digest, is_made_here=is_own, size_bytes=sealed.size_bytes))
            await store.put(groups[-1], sealed)
        self.digests = [scored.digest for scored in groups]
        drawn = tuple(DrawnGroup(scored=scored, age_steps=0, use=1) for scored in groups)
        await store.record_draw(Draw(step=1, groups=drawn, num_zero_variance=0))
        await store.close()

    async def live(self) -> bool:
        """One process: True where it made its step, False where it died."""
        store = await self.open()
        context = make_context(self.config, IDENTITY, emit=self.events.append)
        self.agent = make_agent(context, store)
        worker = make_worker(self.config, self.agent.local, self.learner, clock=context.clock)
        try:
            await self.agent.restore()
            await learn_loop(worker, cast(Any, self.learner))
            return True
        except Death:
            self.num_deaths += 1
            return False
        finally:
            await store.close()

    @asynccontextmanager
    async def resumed(self) -> AsyncGenerator[Agent]:
        """The agent of one process, without a learner."""
        store = await self.open()
        agent = make_agent(make_context(self.config, IDENTITY, emit=self.events.append), store)
        await agent.restore()
        yield agent
        await store.close()

    @property
    def given_up(self) -> list[tuple[str, str]]:
        return [(event.digest, event.producer) for event in events_of(GroupGivenUp, self.events)]


async def test_only_the_group_that_kills_is_given_up_and_its_producer_charged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killer: list[Digest] = []
    node = Node(tmp_path, FakeLearner(lambda digests: bool(digests & {*killer})))
    await node.fill()
    killer.append(node.digests[2])
    assert not await node.live(), "the second death: the first was when the draw was made"
    assert not await node.live(), "the third one is a trial, and tells which group it was"
    assert not node.given_up
    assert not await node.live(), "the whole node ended: that could have been the machine"
    assert await node.live()
    assert node.learner.learned == [frozenset(node.digests) - {*killer}]
    assert node.given_up == [(node.digests[2].hex(), PEER.node_id)]
    assert node.agent.replay.num_dropped == {"given_up": 1}
    assert node.agent.reputation.score(PEER.node_id) < 0 == node.agent.reputation.score(OTHER.node_id)
    assert "a group ended the process alone and is given up" in caplog.text
    assert not events_of(DrawsAbandoned, node.events)

    store = await node.open()
    await store.put_note("checkpoints", "")  # as if it had died before its checkpoint
    await store.close()
    again = Node(tmp_path, FakeLearner(node.learner.is_deadly))
    assert await again.live(), "a resume from before it makes the same step again"
    assert again.learner.learned == node.learner.learned and not again.learner.tried and not again.given_up
    store = await node.open()
    assert (await store.uses())[node.digests[2]] > 1000, "no draw may take it again, however often one may be used"
    assert [key for key in await store.notes() if key != "checkpoints"] == [], "a step that was made is not counted"
    await store.close()


async def test_without_the_count_the_draw_kills_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack, with the defence taken out."""
    monkeypatch.setattr(step_attempts, "TRIED_AT", 1_000_000)
    node = Node(tmp_path, FakeLearner(lambda digests: len(digests) > 1))
    await node.fill()
    assert [await node.live() for _ in range(MOST_LIVES)] == [False] * MOST_LIVES


async def test_every_killer_of_a_draw_is_found_and_own_groups_charge_nobody(tmp_path: Path) -> None:
    killers: set[Digest] = set()
    node = Node(tmp_path, FakeLearner(lambda digests: bool(digests & killers)))
    await node.fill()
    killers |= {node.digests[0], node.digests[1], node.digests[3]}
    while not await node.live():
        assert node.num_deaths <= 1 + 2 * len(killers)
    assert node.learner.learned == [frozenset({node.digests[2]})]
    assert {digest for digest, _ in node.given_up} == {digest.hex() for digest in killers}
    assert node.agent.reputation.score(IDENTITY.node_id) == 0.0
    assert len(node.agent.reputation) == 1, "of the last killer: own groups charge nobody, and a score is of a process"


async def test_a_draw_of_killers_alone_is_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeLearner(bool), num_steps=1)
    await node.fill()
    for _ in range(9):  # the second time it is begun, and each of four groups twice
        assert not await node.live()
    async with node.resumed() as agent:
        (draw,) = await agent.local.redraw(1)
        attempt = await agent.local.begin_again(1)
        assert {drawn.scored.digest for drawn in draw.groups} <= attempt.left_out == frozenset(node.digests)
        assert await agent.local.redraw(1) == []


async def test_a_worker_that_dies_under_a_living_agent_tells_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeLearner(lambda digests: False))
    await node.fill()
    async with node.resumed() as agent:
        assert (await agent.local.begin_again(1)).trial is None
        assert (await agent.local.begin_again(1)).trial == node.digests[0]
        assert (await agent.local.begin_again(1, node.digests[0])).trial == node.digests[1]
        attempt = await agent.local.begin_again(1)
    assert attempt.trial == node.digests[2] and attempt.left_out == {node.digests[1]}
    assert node.given_up == [(node.digests[1].hex(), PEER.node_id)]


@pytest.mark.parametrize("num_kills", [1, 2, 3])
async def test_kills_that_no_group_caused_lose_none(tmp_path: Path, num_kills: int) -> None:
    node = Node(tmp_path, FakeLearner(lambda digests: False, num_kills=num_kills))
    await node.fill()
    while not await node.live():
        assert node.num_deaths <= num_kills
    assert node.learner.learned == [frozenset(node.digests)]
    assert not node.given_up and not events_of(DrawsAbandoned, node.events)
    assert node.learner.tried == node.digests, "two processes began the step and did not end it"


async def test_a_draw_that_kills_though_no_group_of_it_does_is_abandoned(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeLearner(lambda digests: len(digests) > 2))
    await node.fill()
    for _ in range(1 + step_attempts.MAX_WHOLE):  # the second time it is begun, and what follows the trials
        assert not await node.live()
    assert set(node.learner.tried) == set(node.digests)
    async with node.resumed() as agent:
        assert (await agent.local.begin_again(1)).left_out == frozenset(node.digests)
        assert await agent.local.redraw(1) == []
        assert not node.given_up and len(agent.reputation) == 0
    assert events_of(DrawsAbandoned, node.events) == [DrawsAbandoned(from_step=1, first=1, last=1)]


@pytest.mark.parametrize("was_killed", [False, True])
async def test_a_stop_in_order_is_no_death_and_blames_no_group_that_is_being_tried(
    tmp_path: Path, was_killed: bool
) -> None:
    node = Node(tmp_path, FakeLearner(lambda digests: False))
    await node.fill()
    for life in range(5):
        async with node.resumed() as agent:
            await agent.local.redraw(1)
            attempt = await agent.local.begin_again(1)
            if was_killed and life == 0:
                continue
            assert (attempt.trial is not None) is was_killed
            await agent.journal.stop()
    assert not node.given_up
