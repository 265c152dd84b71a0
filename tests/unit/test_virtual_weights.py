"""Manifests, credit and chunks over the faulty network: each fault shows as itself, and a seed repeats it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from swarm.errors import Forged, NotHeld, StorageFull, Unavailable
from swarm.simulate.virtual.faults import FaultPlan, Partition
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import HoldsNothing
from swarm.types import Credit, Digest, NodeId, SealedManifest
from tests.worlds.memory_pair import dial, play

LINEAGE = "f" * 64
Watched = SealedManifest | Credit


def manifest(number: int, size: int = 400) -> SealedManifest:
    return SealedManifest(body=number.to_bytes(4, "big") * (size // 4), public_key=bytes(32), signature=bytes(64))


class Holder(HoldsNothing):
    """Streams manifests with credit between them, one item every `every_s`, then waits; holds chunks by digest."""

    def __init__(self, count: int, every_s: float = 0.0) -> None:
        self.items: list[Watched] = []
        for number in range(1, count + 1):
            self.items += [manifest(number), Credit(head_step=number, granted=8 * number)]
        self.chunks = {hashlib.sha256(data).digest(): data for data in (bytes([n]) * 1000 for n in range(50))}
        self.every_s = every_s
        self.num_open = self.num_sent = 0
        self.error: Exception | None = None

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[Watched]:
        if policy_id != LINEAGE:
            raise NotHeld("no such lineage")
        self.num_open += 1
        try:
            for item in self.items:
                await asyncio.sleep(self.every_s)
                self.num_sent += 1
                yield item
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        if self.error is not None:
            raise self.error
        if digest not in self.chunks:
            raise NotHeld("no such chunk")
        return self.chunks[digest]


async def read(client: Any, count: int) -> list[Watched]:
    async with aclosing(client.watch(LINEAGE, 8)) as stream:
        return [await anext(stream) for _ in range(count)]


def test_a_perfect_network_delivers_everything_in_order() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        assert await read(client, 40) == holder.items
        for digest, data in holder.chunks.items():
            assert await client.fetch_chunk(digest, 1.0) == data
        assert holder.num_open == 0 and network.now_s() == 0.0

    play(scene, FaultPlan(), Holder(20))


def test_a_lineage_or_chunk_that_is_not_held_is_said_so() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        with pytest.raises(NotHeld):
            await anext(client.watch("e" * 64, 0))
        with pytest.raises(NotHeld):
            await client.fetch_chunk(bytes(32), 1.0)
        holder.error = StorageFull("the disk of the other side")
        with pytest.raises(Unavailable):
            await client.fetch_chunk(next(iter(holder.chunks)), 1.0)

    play(scene, FaultPlan(), Holder(20))


def test_a_watcher_that_stops_reading_holds_the_holder_back() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        stream = (await dial(bob)).watch(LINEAGE, 0)
        await anext(stream)
        await asyncio.sleep(100.0)
        assert holder.num_sent < 15
        await stream.aclose()

    play(scene, FaultPlan(), Holder(1000))


def test_a_dropped_connection_ends_watch_and_chunk_and_reading_again_gets_all() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        seen: list[Watched] = []
        got: set[Digest] = set()
        while len(seen) < 10 or got != holder.chunks.keys():
            client = await dial(bob)
            try:
                seen = max(seen, await read(client, 10), key=len)
                for digest in holder.chunks.keys() - got:
                    await client.fetch_chunk(digest, 1.0)
                    got.add(digest)
            except Unavailable as error:
                assert not isinstance(error, Forged)
        assert seen == holder.items[:10] and network.counts["drop"] > 3

    play(scene, FaultPlan(drop_rate=0.1), Holder(20))


def test_a_corrupted_manifest_has_other_bytes_under_the_same_signature_and_leave_stays_whole() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        for item, sent in zip(await read(await dial(bob), 40), holder.items, strict=True):
            if isinstance(item, Credit):
                assert item == sent
                continue
            assert isinstance(sent, SealedManifest)
            assert (item.public_key, item.signature) == (sent.public_key, sent.signature)
            differing = sum(a != b for a, b in zip(item.body, sent.body, strict=True))
            assert differing == 1 and item.digest != sent.digest

    play(scene, FaultPlan(corrupt_rate=1.0), Holder(20))


def test_a_corrupted_chunk_is_forged_and_never_comes_through() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> int:
        client, num_forged = await dial(bob), 0
        for digest, data in holder.chunks.items():
            try:
                assert await client.fetch_chunk(digest, 1.0) == data
            except Forged:
                num_forged += 1
        assert num_forged == network.counts["corrupt"]
        return num_forged

    assert 5 < play(scene, FaultPlan(corrupt_rate=0.4), Holder(20)) < 45


def test_a_manifest_may_arrive_twice_and_nothing_overtakes() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        items = await read(await dial(bob), 40)
        assert items == [item for item in holder.items[:20] for _ in range(2)]

    play(scene, FaultPlan(duplicate_rate=1.0, reorder_rate=0.5, jitter_s=0.2), Holder(20))


def test_large_manifests_and_chunks_take_their_time_on_the_uplink_and_a_deadline_holds() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> tuple[float, float]:
        client, began_s = await dial(bob), network.now_s()
        await client.fetch_chunk(next(iter(holder.chunks)), 60.0)
        chunk_s, began_s = network.now_s() - began_s, network.now_s()
        await read(client, 1)
        manifest_s = network.now_s() - began_s
        with pytest.raises(Unavailable, match=r"in 0\.5 s"):
            await client.fetch_chunk(next(iter(holder.chunks)), 0.5)
        return chunk_s, manifest_s

    slow = Holder(0)
    slow.items = [manifest(1, 100_000)]
    slow.chunks = {hashlib.sha256(bytes(2**20)).digest(): bytes(2**20)}
    assert play(scene, FaultPlan(bytes_per_s=1e5), slow) == (
        pytest.approx(10.49, rel=0.01),
        pytest.approx(1.0, rel=0.01),
    )


def test_a_partition_ends_a_watch_when_it_begins_and_a_chunk_on_its_way() -> None:
    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        with pytest.raises(Unavailable, match="partition"):
            await read(client, 41)
        assert network.now_s() == pytest.approx(30.0) and holder.num_open == 0
        with pytest.raises(Unavailable):
            await client.fetch_chunk(next(iter(holder.chunks)), 5.0)
        await asyncio.sleep(61.0)
        assert await read(await dial(bob), 40) == holder.items

    parted = (Partition(start_s=30.0, end_s=90.0, island=frozenset({1})),)
    play(scene, FaultPlan(partitions=parted), Holder(20))

    async def on_its_way(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        with pytest.raises(Unavailable, match="partition"):
            await client.fetch_chunk(next(iter(holder.chunks)), 60.0)
        assert network.now_s() == pytest.approx(5.0)

    parted = (Partition(start_s=5.0, end_s=90.0, island=frozenset({1})),)
    play(on_its_way, FaultPlan(latency_s=2.0, partitions=parted), Holder(20))


def test_a_seed_repeats_every_event_of_watches_and_chunks_and_another_does_not() -> None:
    faults = FaultPlan(latency_s=0.01, jitter_s=0.1, duplicate_rate=0.2, reorder_rate=0.2, corrupt_rate=0.1)

    async def scene(network: MemoryNetwork, bob: MemoryTransport, holder: Holder) -> None:
        client = await dial(bob)
        chunks = (client.fetch_chunk(digest, 9.0) for digest in holder.chunks)
        await asyncio.gather(*(read(client, 20) for _ in range(3)), *chunks, return_exceptions=True)

    def events(seed: int) -> list[Any]:
        log: list[Any] = []
        play(scene, faults, Holder(40, every_s=0.05), seed, log)
        return log

    assert events(5) == events(5)
    assert events(5) != events(6)
