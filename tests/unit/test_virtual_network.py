"""The faulty network in memory: every fault happens, looks like broken TCP, and repeats under its seed."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swarm.errors import NotHeld, StorageFull, TooLarge, Unauthenticated, Unavailable
from swarm.interfaces import PeerAddress, StreamItem
from swarm.simulate.virtual.faults import FaultPlan, Partition
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, Digest, NodeId, SealedGroup, StreamFilter
from tests.worlds.memory_pair import ALICE, BOB, dial, play


def sealed(number: int, size: int = 100) -> SealedGroup:
    body = number.to_bytes(4, "big") * (size // 4)
    return SealedGroup(
        digest=hashlib.sha256(body).digest(),
        producer=ALICE,
        public_key=bytes(32),
        signature=bytes(64),
        is_compressed=False,
        body=body,
    )


class Holder(HoldsNothing):
    """A handler that streams `count` groups, one every `every_s`, then waits or ends."""

    def __init__(self, count: int, every_s: float = 0.0, notices: bool = False, is_live: bool = True) -> None:
        self.groups = [sealed(number) for number in range(1, count + 1)]
        self.every_s, self.notices, self.is_live = every_s, notices, is_live
        self.num_open, self.num_sent = 0, 0

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        self.num_open += 1
        try:
            for sequence, group in enumerate(self.groups, 1):
                if sequence <= cursor.sequence:
                    continue
                await asyncio.sleep(self.every_s)
                self.num_sent += 1
                yield StreamItem(
                    cursor=Cursor(epoch="e", sequence=sequence),
                    digest=group.digest,
                    size_bytes=group.size_bytes,
                    sealed=None if self.notices else group,
                )
            if self.is_live:
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        for group in self.groups:
            if group.digest == digest:
                return group
        raise NotHeld("not here")


async def read(client: Any, count: int, start: int = 0) -> list[StreamItem]:
    items: list[StreamItem] = []
    stream = client.subscribe(Cursor(epoch="e", sequence=start), StreamFilter())
    try:
        async for item in stream:
            items.append(item)
            if len(items) == count:
                return items
    finally:
        await stream.aclose()
    raise AssertionError("the stream ended without an error")


def test_a_perfect_network_delivers_everything_in_order_and_closes_the_server_side() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        items = await read(await dial(bob), 20)
        assert [item.cursor.sequence for item in items] == list(range(1, 21))
        assert [item.sealed for item in items] == holder.groups
        assert holder.num_open == 0 and network.now_s() == 0.0

    play(scene, FaultPlan(), Holder(20))


def test_a_reader_that_stops_reading_holds_the_sender_back() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        stream = (await dial(bob)).subscribe(Cursor(), StreamFilter())
        await anext(stream)
        await asyncio.sleep(100.0)
        assert holder.num_sent < 15
        await stream.aclose()

    play(scene, FaultPlan(), Holder(1000))


def test_latency_and_bandwidth_take_their_time() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> float:
        client = await dial(bob)
        began_s = network.now_s()
        await client.fetch(holder.groups[0].digest, 10**6, 60.0)
        return network.now_s() - began_s

    big = Holder(1)
    big.groups = [sealed(1, 1_000_000)]
    assert play(scene, FaultPlan(latency_s=0.5), big) == pytest.approx(1.0)
    assert play(scene, FaultPlan(bytes_per_s=1e5), big) == pytest.approx(10.0, rel=0.01)


def test_a_dropped_message_breaks_the_connection_and_reading_resumes_on_a_new_one() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        seen: list[int] = []
        while len(seen) < 20:
            stream = (await dial(bob)).subscribe(Cursor(epoch="e", sequence=len(seen)), StreamFilter())
            try:
                async for item in stream:
                    seen.append(item.cursor.sequence)
                    if len(seen) == 20:
                        break
            except Unavailable:
                pass
            await stream.aclose()
        assert seen == list(range(1, 21))
        assert network.counts["drop"] > 0

    play(scene, FaultPlan(drop_rate=0.2), Holder(20))


def test_a_corrupted_group_has_other_bytes_and_their_digest() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        (item,) = await read(await dial(bob), 1)
        assert item.sealed is not None and item.sealed.body != holder.groups[0].body
        assert item.digest == holder.groups[0].digest != item.sealed.digest
        assert item.sealed.digest == hashlib.sha256(item.sealed.body).digest()

    play(scene, FaultPlan(corrupt_rate=1.0), Holder(20))


def test_duplicates_arrive_twice_and_late_notices_after_later_ones() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> list[int]:
        return [item.cursor.sequence for item in await read(await dial(bob), 20)]

    twice = play(scene, FaultPlan(duplicate_rate=1.0), Holder(20))
    assert twice == [number for number in range(1, 11) for _ in range(2)]
    late = play(scene, FaultPlan(reorder_rate=0.5, reorder_s=3.0), Holder(20, every_s=0.1, notices=True))
    assert sorted(late) == list(range(1, 21)) and late != sorted(late)
    own = play(scene, FaultPlan(reorder_rate=0.5, reorder_s=3.0), Holder(20, every_s=0.1))
    assert own == list(range(1, 21))  # a log is one stream: it keeps its order


def test_a_partition_breaks_idle_streams_when_it_begins_and_dials_until_it_ends() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        with pytest.raises(Unavailable, match="partition"):
            await read(client, 21)
        assert network.now_s() == pytest.approx(30.0) and holder.num_open == 0
        assert network.is_cut(ALICE, BOB)
        with pytest.raises(Unavailable):
            await dial(bob)
        assert network.now_s() == pytest.approx(35.0)
        await asyncio.sleep(56.0)
        assert len(await read(await dial(bob), 20)) == 20

    parted = (Partition(start_s=30.0, end_s=90.0, island=frozenset({1})),)
    play(scene, FaultPlan(partitions=parted), Holder(20))


def test_a_crash_breaks_every_stream_at_once_and_a_restart_answers_again() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        reading = asyncio.create_task(read(client, 21))
        await asyncio.sleep(1.0)
        network.crash(ALICE)
        with pytest.raises(Unavailable, match="gone"):
            await reading
        assert holder.num_open == 0 and network.now_s() == pytest.approx(1.0)
        for call in (dial(bob), client.fetch(holder.groups[0].digest, 10**6, 1.0)):
            with pytest.raises(Unavailable):
                await call
        await MemoryTransport(network, ALICE).serve(holder)
        assert len(await read(await dial(bob), 5, start=15)) == 5

    play(scene, FaultPlan(), Holder(20))


def test_errors_of_a_fetch_keep_their_meaning() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        with pytest.raises(NotHeld):
            await client.fetch(bytes(32), 10**6, 1.0)
        with pytest.raises(TooLarge):
            await client.fetch(holder.groups[0].digest, 10, 1.0)
        with pytest.raises(Unauthenticated):
            await bob.connect(PeerAddress(node_id=BOB, endpoint=f"{ALICE[:16]}.memory:1"), 1.0)
        await client.close()
        with pytest.raises(Unavailable):
            await client.fetch(holder.groups[0].digest, 10**6, 1.0)

    play(scene, FaultPlan(), Holder(20))

    async def slow(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        with pytest.raises(Unavailable, match=r"1\.0 s"):
            await client.fetch(holder.groups[0].digest, 10**6, 1.0)

    play(slow, FaultPlan(latency_s=2.0), Holder(20))


def test_a_server_that_fails_on_purpose_is_unavailable_and_a_bug_in_it_fails_the_run() -> None:
    class Full(Holder):
        error: Exception = StorageFull("full")

        async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
            raise self.error
            yield  # pragma: no cover

    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        with pytest.raises(Unavailable):
            await read(await dial(bob), 1)

    holder = Full(1)
    play(scene, FaultPlan(), holder)
    holder.error = ZeroDivisionError("a bug")
    with pytest.raises(BaseExceptionGroup):
        play(scene, FaultPlan(), holder)


def test_random_plans_repeat_stay_in_bounds_and_cover_every_fault() -> None:
    plans = [FaultPlan.random(seed, num_nodes=10, duration_s=100.0) for seed in range(200)]
    assert plans == [FaultPlan.random(seed, num_nodes=10, duration_s=100.0) for seed in range(200)]
    for plan in plans:
        assert all(p.end_s <= 75.0 + 1e-9 and 1 <= len(p.island) <= 5 for p in plan.partitions)
        assert all(c.at_s + c.down_s <= 75.0 + 1e-9 and 0 <= c.node < 10 for c in plan.crashes)
        assert len({c.node for c in plan.crashes}) == len(plan.crashes)
    for name in ("jitter_s", "drop_rate", "duplicate_rate", "reorder_rate", "corrupt_rate", "partitions", "crashes"):
        on = sum(bool(getattr(plan, name)) for plan in plans)
        assert 50 < on < 190, (name, on)
