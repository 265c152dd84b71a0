"""Neighbours that send without end, announce and do not deliver, or vanish."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from swarm.config import NodeConfig, ReplayConfig
from swarm.errors import NotHeld, Unavailable
from swarm.events import GroupRefused, events_of
from swarm.exchange.agent import Agent
from swarm.interfaces import StreamItem
from swarm.peers.quotas import ITEMS_PER_GROUP
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.types import (
    Cursor,
    Digest,
    NodeId,
    RefusalReason,
    ScoredGroup,
    SealedGroup,
    StreamFilter,
)

from .neighbour_bench import FIRST, OURS, PRODUCER, SECOND, Bench, Honest, Neighbour, notice, play, scene

# --- send without end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [2**40, 100])
def test_a_neighbour_that_announces_without_end_is_dropped_and_told_of(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(Neighbour):
        async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
            while True:
                self.num_said += 1
                yield notice(self.num_said, known.digest, size_bytes)
                await asyncio.sleep(0.001)

    async def scene(bench: Bench) -> None:
        nonlocal known
        known = bench.made(1)
        await bench.agent.ingest.receive(known, via=SECOND.node_id)
        endless = Endless(FIRST.node_id, [])
        bench.add(endless)
        await asyncio.sleep(10.0)
        assert not bench.agent.reputation.is_allowed(FIRST.node_id)
        assert endless.num_said <= 10 * ITEMS_PER_GROUP + 5
        assert bench.agent.ingest.refusals == {RefusalReason.TOO_MANY_ITEMS: 3}
        assert [refused.producer for refused in events_of(GroupRefused, bench.events)] == [FIRST.node_id] * 3

    known: Any = None
    monkeypatch.setattr("swarm.peers.quotas.GROUPS_PER_MINUTE", 10)
    play(scene)


@scene()
async def test_a_neighbour_with_a_long_backlog_and_steady_news_stays(bench: Bench) -> None:
    backlog = bench.agent.config.replay.max_groups
    known = bench.made(1)
    await bench.agent.ingest.receive(known, via=SECOND.node_id)

    class Honest(Neighbour):
        async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
            while True:
                self.num_said += 1
                yield notice(self.num_said, known.digest)
                await asyncio.sleep(0.0 if self.num_said < backlog else 0.002)  # 30,000 a minute

    honest = Honest(FIRST.node_id, [])
    bench.add(honest)
    await asyncio.sleep(120.0)
    assert bench.agent.reputation.is_allowed(FIRST.node_id) and not bench.agent.ingest.refusals
    assert honest.num_said > 60_000


@scene()
async def test_groups_that_are_not_taken_count_as_received_bytes(bench: Bench) -> None:
    sealed = bench.made(1)
    bench.agent.ingest.is_wanted_from = lambda peer: False  # type: ignore[method-assign]
    item = StreamItem(
        cursor=Cursor(epoch="e", sequence=1), digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed
    )
    bench.add(Neighbour(FIRST.node_id, [item]))
    await asyncio.sleep(5.0)
    assert bench.agent.ingest.bytes_received == sealed.size_bytes


# --- what a forger says of others -----------------------------------------------------------------------


@scene()
async def test_a_refusal_names_the_sender_where_its_group_may_be_in_anybodys_name(bench: Bench) -> None:
    genuine = bench.made(1)
    forged = replace(bench.made(2), signature=bytes(64))
    for sealed in (genuine, replace(genuine, producer=SECOND.node_id), forged):
        await bench.agent.ingest.receive(sealed, via=FIRST.node_id)
    told = [(refused.reason, refused.producer, refused.via) for refused in events_of(GroupRefused, bench.events)]
    assert told == [(reason, FIRST.node_id, FIRST.node_id) for reason in ("duplicate", "wrong_signature")]


@scene()
async def test_a_refusal_names_the_producer_where_it_signed_what_another_hands_on(bench: Bench) -> None:
    lie = make_group(PRODUCER.node_id, created_at_s=bench.clock.now_s())
    lie = replace(lie, rollouts=(replace(lie.rollouts[0], claimed_reward=0.3), *lie.rollouts[1:]))
    sealed = make_sealed(lie, PRODUCER)
    await bench.agent.ingest.receive(sealed, via=FIRST.node_id)
    (refused,) = events_of(GroupRefused, bench.events)
    assert (refused.reason, refused.producer, refused.via) == ("false_reward", PRODUCER.node_id, FIRST.node_id)
    assert refused.digest == sealed.digest.hex()


# --- what is asked for ----------------------------------------------------------------------------------


class Real(Neighbour):
    """A node of its own."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent.node_id, [])
        self.agent = agent

    def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        return self.agent.streams.subscribe(OURS.node_id, cursor, wanted)


def test_a_step_that_waits_for_everybody_gets_what_a_neighbour_made_without_signal() -> None:
    async def scene(bench: Bench) -> None:
        other = bench.node(SECOND, NodeConfig(replay=rounds))
        bench.add(Real(other))
        await asyncio.sleep(5.0)
        await other.local.put(make_group(SECOND.node_id, texts=["7"] * 8, created_at_s=bench.clock.now_s()))
        await bench.agent.local.put(make_group(OURS.node_id, task_id=8, created_at_s=bench.clock.now_s()))
        async with asyncio.timeout(60.0):
            draw = await bench.agent.local.draw(bench.agent.head)
        assert [drawn.scored.group.producer for drawn in draw.groups] == [OURS.node_id]
        assert bench.agent.ingest.num_admitted == 1, "it waited for what nobody can learn from"

    rounds = ReplayConfig(local_groups=1, external_groups=1, barrier=True)
    play(scene, replay=rounds)


# --- announced and not delivered ------------------------------------------------------------------------


class Failing(Neighbour):
    """Announces first, and delivers in none of the ways there are."""

    def __init__(self, node_id: NodeId, sealed: SealedGroup, how: str) -> None:
        super().__init__(node_id, [notice(1, sealed.digest)])
        self.sealed, self.how = sealed, how

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        self.fetched.append(digest)
        await asyncio.sleep(timeout_s if self.how == "stalls" else 5.0)
        if self.how == "forges":
            return replace(self.sealed, signature=bytes(64))
        raise NotHeld("not here") if self.how == "lacks" else Unavailable(self.how)


@pytest.mark.parametrize("how", ["stalls", "dies", "lacks", "forges"])
@scene()
async def test_what_the_first_to_announce_it_does_not_deliver_comes_from_another(bench: Bench, how: str) -> None:
    withheld, next_one = bench.made(1), bench.made(2)
    bench.add(Failing(FIRST.node_id, withheld, how))
    bench.add(Honest(SECOND.node_id, [withheld, next_one], after_s=1.0))
    await asyncio.sleep(2.0)
    assert await bench.agent.store.contains(next_one.digest), "the honest one has to wait for the other"
    await asyncio.sleep(33.0)
    assert await bench.agent.store.contains(withheld.digest)
    await asyncio.sleep(60.0)
    assert not bench.agent.ingest.fetching


@scene()
async def test_two_that_announce_a_group_and_never_deliver_it_are_asked_a_few_times(bench: Bench) -> None:
    withheld = bench.made(1)
    both = [Failing(identity.node_id, withheld, "dies") for identity in (FIRST, SECOND)]
    for neighbour in both:
        bench.add(neighbour)
    await asyncio.sleep(3600.0)
    nums_fetched = [len(neighbour.fetched) for neighbour in both]
    assert max(nums_fetched) <= 12 and not bench.agent.ingest.fetching


@scene()
async def test_a_chain_of_neighbours_that_do_not_deliver_ends_at_the_one_that_does(bench: Bench) -> None:
    withheld = bench.made(1)
    for number, how in enumerate(("dies", "lacks", "stalls")):
        bench.add(Failing(make_identity(10 + number).node_id, withheld, how))
    honest = Honest(SECOND.node_id, [withheld], after_s=1.0)
    bench.add(honest)
    await asyncio.sleep(60.0)
    assert honest.fetched == [withheld.digest] and bench.agent.ingest.num_admitted == 1


@scene()
async def test_a_neighbour_that_goes_leaves_what_it_was_to_deliver_to_the_next(bench: Bench) -> None:
    withheld = bench.made(1)
    bench.add(Failing(FIRST.node_id, withheld, "stalls"))
    bench.add(Honest(SECOND.node_id, [withheld], after_s=1.0))
    await asyncio.sleep(2.0)
    bench.drop(FIRST)
    await asyncio.sleep(3.0)
    assert await bench.agent.store.contains(withheld.digest) and not bench.agent.ingest.fetching


@pytest.mark.parametrize("lookup_s", [0.0, 0.1])
@scene()
async def test_what_several_announce_is_fetched_once(bench: Bench, lookup_s: float) -> None:
    """Also where both streams are at the same notice while the store looks for it."""
    contains = bench.agent.store.contains

    async def slowly(digest: Digest) -> bool:
        await asyncio.sleep(lookup_s)
        return await contains(digest)

    bench.agent.store.contains = slowly  # type: ignore[method-assign]
    groups = [bench.made(number) for number in range(20)]
    neighbours = [Honest(identity.node_id, groups) for identity in (FIRST, SECOND)]
    for neighbour in neighbours:
        bench.add(neighbour)
    await asyncio.sleep(5.0)
    assert bench.agent.ingest.num_admitted == 20 and not bench.agent.ingest.refusals
    assert sum(len(neighbour.fetched) for neighbour in neighbours) == 20
    assert not bench.agent.num_failures and not bench.agent.ingest.fetching


# --- let go in the middle of a group --------------------------------------------------------------------


def slow_put(bench: Bench) -> None:
    """The disk stores at once, and a thread tells of it later, whoever waits."""
    at_once = bench.agent.store.put

    async def put(scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        cursor = await at_once(scored, sealed)
        await asyncio.sleep(5.0)
        return cursor

    bench.agent.store.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize("is_inline", [True, False])
@scene()
async def test_a_group_on_its_way_into_the_store_reaches_the_learner_though_its_neighbour_is_dropped(
    bench: Bench, is_inline: bool
) -> None:
    slow_put(bench)
    sealed = bench.made(1)
    neighbour = Honest(FIRST.node_id, [sealed])
    if is_inline:
        neighbour.items = [replace(neighbour.items[0], sealed=sealed)]
    bench.add(neighbour)
    await asyncio.sleep(3.0)
    assert await bench.agent.store.contains(sealed.digest)
    bench.drop(FIRST)
    await asyncio.sleep(3.0)
    assert sealed.digest in bench.agent.replay.digests and bench.agent.ingest.num_admitted == 1
    assert not bench.agent.peers.connected and not bench.agent.ingest.fetching


@scene()
async def test_a_neighbour_that_moved_stays_connected_when_its_old_stream_ends_late(bench: Bench) -> None:
    slow_put(bench)
    bench.add(Honest(FIRST.node_id, [bench.made(1)]))
    await asyncio.sleep(3.0)
    bench.adverts[0] = replace(bench.adverts[0], endpoints=("elsewhere:1",))
    await asyncio.sleep(30.0)
    assert bench.agent.peers.connected == {FIRST.node_id}
    bench.drop(FIRST)
    await asyncio.sleep(30.0)
    assert not bench.agent.peers.connected
