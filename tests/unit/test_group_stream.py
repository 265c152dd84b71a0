"""To whom a stored group is sent: what nobody can learn from stays where it is, unless somebody asks for it."""

import asyncio
from dataclasses import replace

import pytest

from swarm.clock import ManualClock
from swarm.episode import EpisodeOutcome
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_group, make_identity, make_scored, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.testing.outcomes import make_outcome
from swarm.types import Cursor, Digest, NodeId, RolloutGroup, SealedGroup, StreamFilter

OURS, OTHER, READER, TRAINER = (make_identity(number) for number in range(4))
ZERO_VARIANCE = ["7"] * 4


class CountingStore(MemoryGroupStore):
    """Counts how often somebody looks for news."""

    num_looks = 0

    async def since(self, cursor: Cursor, limit: int, own_only: bool) -> list[tuple[Cursor, SealedGroup]]:
        self.num_looks += 1
        return await super().since(cursor, limit, own_only)


NEVER_S = 1e6  # a drain that takes its time hangs, and fails


class Held:
    """A node's log, and its serving half."""

    def __init__(self) -> None:
        self.store = CountingStore(ManualClock(), 2**24)
        self.streams = make_agent(make_context(identity=OURS), self.store).streams

    async def add(self, group: RolloutGroup, outcomes: tuple[EpisodeOutcome, ...] = ()) -> Digest:
        """Stores one group of ours, or of another node that came over a third."""
        identity = OURS if group.producer == OURS.node_id else OTHER
        sealed = make_sealed(group, identity)
        scored = make_scored(group, digest=sealed.digest, is_made_here=identity is OURS)
        scored = replace(scored, outcomes=outcomes)
        await self.store.put(scored, sealed)
        await self.streams.read_head()
        self.streams.offer(scored, via=identity.node_id)
        return sealed.digest

    async def sent(self, peer: NodeId, wanted: StreamFilter, count: int) -> list[Digest]:
        """The first `count` that a new stream sends."""
        stream = self.streams.subscribe(peer, Cursor(), wanted)
        return [(await anext(stream)).digest for _ in range(count)]  # type: ignore[call-overload]


@pytest.mark.parametrize("producer", [OURS.node_id, OTHER.node_id])
async def test_a_group_without_signal_is_sent_only_to_those_who_want_it(producer: NodeId) -> None:
    held = Held()
    zero_variance = await held.add(make_group(producer, texts=ZERO_VARIANCE))
    with_signal = await held.add(make_group(producer, task_id=8))
    assert await held.sent(READER.node_id, StreamFilter(relay=True), 1) == [with_signal]
    assert await held.sent(READER.node_id, StreamFilter(relay=True, wants_zero_variance=True), 2) == [
        zero_variance,
        with_signal,
    ]


async def test_a_group_whose_turns_alone_differ_is_sent_to_those_who_want_it() -> None:
    held = Held()
    group = make_group(OURS.node_id, texts=ZERO_VARIANCE)
    turns = [make_outcome(1.0, observations=("", ""), turn_rewards=(each, 0.5)) for each in (0.5, 0.5, 0.25)]
    last = len(group.rollouts) - 1
    await held.add(group, (turns[0],) * (last + 1))
    apart = await held.add(make_group(OURS.node_id, task_id=9, texts=["9"] * (last + 1)), (*turns[:1] * last, turns[2]))
    with_signal = await held.add(make_group(OURS.node_id, task_id=8))
    assert await held.sent(READER.node_id, StreamFilter(), 1) == [with_signal]
    assert await held.sent(READER.node_id, StreamFilter(wants_turn_signal=True), 2) == [apart, with_signal]


async def test_a_waiting_stream_sleeps_on_when_only_groups_without_signal_come() -> None:
    held = Held()
    stream = held.streams.subscribe(READER.node_id, Cursor(), StreamFilter())
    item = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    looks = held.store.num_looks
    for task_id in range(3):
        await held.add(make_group(OURS.node_id, task_id=task_id, texts=ZERO_VARIANCE))
        for _ in range(10):
            await asyncio.sleep(0)
    assert not item.done() and held.store.num_looks == looks, "it was woken for nothing"
    with_signal = await held.add(make_group(OURS.node_id, task_id=8))
    assert (await item).digest == with_signal


async def test_the_trainer_that_gave_leave_for_it_gets_it_in_any_case() -> None:
    held = Held()
    zero_variance = await held.add(replace(make_group(OURS.node_id, texts=ZERO_VARIANCE), policy_id=TRAINER.node_id))
    assert await held.sent(TRAINER.node_id, StreamFilter(), 1) == [zero_variance]


async def test_who_leaves_waits_until_each_stream_has_sent_what_there_is() -> None:
    held, may_read, read = Held(), asyncio.Event(), list[Digest]()
    await held.streams.drain(NEVER_S)  # nobody reads

    async def reader(wanted: StreamFilter) -> None:
        async for item in held.streams.subscribe(READER.node_id, Cursor(), wanted):
            await may_read.wait()
            read.append(item.digest)

    tasks = [asyncio.ensure_future(reader(StreamFilter(relay=relay))) for relay in (False, True)]
    await asyncio.sleep(0)
    await held.add(make_group(OURS.node_id, texts=ZERO_VARIANCE))  # for none of them
    added = [await held.add(make_group(OURS.node_id, task_id=task_id)) for task_id in range(3)]
    await held.streams.drain(0.01)  # they do not read: it goes on all the same
    assert read == []
    leaving = asyncio.ensure_future(held.streams.drain(NEVER_S))
    await asyncio.sleep(0)
    assert not leaving.done()
    may_read.set()
    await leaving
    assert sorted(read) == sorted(2 * added)
    await held.streams.drain(NEVER_S)  # they are there, and have all
    leaving = asyncio.ensure_future(held.streams.drain(NEVER_S))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await leaving  # a stream that ends is waited for no longer
