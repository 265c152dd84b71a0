"""Slots for chunks of weights: who is served next, who is cut, who is sent away."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarm.errors import Unavailable
from swarm.weight_sync.weight_server import CHUNKS_PER_PEER, CHUNKS_TOTAL, CHUNKS_WAITING, ChunkSlots

NUM_FULL = CHUNKS_TOTAL // CHUNKS_PER_PEER  # peers that can hold every slot


class Call:
    """A call of a peer that nobody reads the answer of, until `end`."""

    def __init__(self, slots: ChunkSlots, peer: str) -> None:
        self.peer = peer
        self.has_slot = False
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[Any], None]] = []
        self.task = asyncio.ensure_future(self._run(slots))

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def _run(self, slots: ChunkSlots) -> None:
        try:
            await slots.acquire(self.peer, self)  # type: ignore[arg-type]
            self.has_slot = True
            await self._ended.wait()
        finally:
            for callback in self._callbacks:
                callback(self)

    async def end(self) -> None:
        self._ended.set()
        await asyncio.wait([self.task])


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begin(slots: ChunkSlots, peer: str, number: int) -> list[Call]:
    calls = [Call(slots, peer) for _ in range(number)]
    await settle()
    return calls


async def end(calls: list[Call]) -> None:
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)


async def test_a_free_slot_goes_to_who_holds_none_however_long_the_line_of_others():
    slots = ChunkSlots(60.0)
    slow = [call for n in range(NUM_FULL) for call in await begin(slots, f"slow{n}", CHUNKS_PER_PEER)]
    assert all(call.has_slot for call in slow)
    queued = [call for n in range(4) for call in await begin(slots, f"queued{n}", CHUNKS_PER_PEER)]
    honest = await begin(slots, "honest", 2)
    for call in slow[:5]:
        await call.end()
    assert {call.peer for call in queued if call.has_slot} == {f"queued{n}" for n in range(4)}
    assert [call.has_slot for call in honest] == [True, False]
    await honest[0].end()  # who gives a slot back is the one that holds none
    assert honest[1].has_slot
    await end([*slow, *queued, *honest])


async def test_slots_that_nobody_waits_for_go_to_whoever_asks():
    slots = ChunkSlots(60.0)
    calls = await begin(slots, "only", CHUNKS_PER_PEER + 1)
    assert [call.has_slot for call in calls] == [True] * CHUNKS_PER_PEER + [False]
    with pytest.raises(Unavailable, match="fewer at a time"):
        await calls[-1].task
    await end(calls[:-1])


async def test_a_chunk_that_is_not_read_is_cut_once_another_call_waits_and_not_before():
    slots = ChunkSlots(0.05)
    slow = [call for n in range(NUM_FULL) for call in await begin(slots, f"slow{n}", CHUNKS_PER_PEER)]
    await asyncio.sleep(0.2)
    assert not any(call.task.done() for call in slow)
    (honest,) = await begin(slots, "honest", 1)
    assert honest.has_slot
    assert [call.task.cancelled() for call in slow] == [True] + [False] * (CHUNKS_TOTAL - 1)
    await end([*slow, honest])


async def test_a_full_line_sends_the_newest_call_of_the_longest_one_away():
    slots = ChunkSlots(60.0)
    slow = [call for n in range(NUM_FULL) for call in await begin(slots, f"slow{n}", CHUNKS_PER_PEER)]
    queued = [
        call
        for n in range(CHUNKS_WAITING // CHUNKS_PER_PEER)
        for call in await begin(slots, f"queued{n}", CHUNKS_PER_PEER)
    ]
    honest = await begin(slots, "honest", 3)
    assert not any(call.task.done() for call in honest)
    away = [call for call in queued if call.task.done()]
    assert len(away) == len({call.peer for call in away}) == 3
    for call in away:
        with pytest.raises(Unavailable, match="ask again"):
            await call.task
    await end([*slow, *(call for call in queued if call not in away), *honest])


async def test_a_call_that_ends_while_it_waits_leaves_nothing_behind():
    slots = ChunkSlots(60.0)
    slow = [call for n in range(NUM_FULL) for call in await begin(slots, f"slow{n}", CHUNKS_PER_PEER)]
    waiting = await begin(slots, "waiting", CHUNKS_PER_PEER)
    await end(waiting)
    again = await begin(slots, "waiting", CHUNKS_PER_PEER)
    assert not any(call.task.done() for call in again)
    await end(slow)
    await settle()
    assert all(call.has_slot for call in again)
    await end(again)


async def test_a_chunk_that_waits_for_the_upload_limit_is_not_late():
    slots = ChunkSlots(0.2)
    holders = [call for n in range(NUM_FULL) for call in await begin(slots, f"peer {n}", CHUNKS_PER_PEER)]
    held_up = [asyncio.ensure_future(slots.held_up(call, asyncio.sleep(1.0))) for call in list(slots._held)]
    waiting = await begin(slots, "another", 1)
    await asyncio.sleep(0.5)
    assert all(call.has_slot for call in holders) and not waiting[0].has_slot
    await asyncio.gather(*held_up)
    await asyncio.sleep(0.5)  # now it is they who do not read
    assert waiting[0].has_slot
    await end([*holders, *waiting])


async def test_a_peer_whose_connection_broke_without_a_word_has_slots_over_the_next_one():
    slots = ChunkSlots(0.05)
    dead = await begin(slots, "peer", CHUNKS_PER_PEER)
    await asyncio.sleep(0.2)
    anew = await begin(slots, "peer", 3)
    assert [call.has_slot for call in anew] == [True] * 3
    assert [call.task.cancelled() for call in dead] == [True] * 3 + [False] * (CHUNKS_PER_PEER - 3)
    assert not any(call.task.done() for call in anew)
    await end([*dead, *anew])
