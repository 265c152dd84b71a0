"""Store on disk, store in memory and a list agree after any sequence of operations."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_groups import make_entry

from swarm.clock import ManualClock
from swarm.exchange.group_store import SqliteGroupStore
from swarm.interfaces import GroupStore
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.types import Cursor, Digest, Draw, DrawnGroup

ENTRIES = [make_entry(n, is_made_here=n % 2 == 0, first_seen_s=float(n)) for n in range(8)]
SIZE_BYTES = max(sealed.size_bytes for _, sealed in ENTRIES)

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7)),
        st.tuples(st.just("draw"), st.integers(1, 6), st.lists(st.integers(0, 7), max_size=3, unique=True)),
        st.tuples(
            st.just("forget"),
            st.integers(0, 8),
            st.integers(0, 8),
            st.one_of(st.none(), st.integers(1, 6)),
            st.lists(st.integers(0, 7), max_size=2),
        ),
        st.tuples(st.just("abandon"), st.integers(1, 6), st.integers(1, 7)),
        st.tuples(st.just("reopen")),
    ),
    max_size=25,
)


async def observe(store: GroupStore) -> object:
    """Everything a reader can see, without the random epoch."""
    log = await store.since(Cursor(), 100, own_only=False)
    own = await store.since(Cursor(), 100, own_only=True)
    draws = await store.draws(0)
    return (
        [(cursor.sequence, sealed) for cursor, sealed in log],
        [(cursor.sequence, sealed) for cursor, sealed in own],
        (await store.head()).sequence,
        [await store.contains(sealed.digest) for _, sealed in ENTRIES],
        [await store.get(sealed.digest) for _, sealed in ENTRIES],
        await store.journal(0),
        await store.uses(),
        [scored.digest for scored in await store.load_scored(100)],
        [(draw.step, [drawn.scored.digest for drawn in draw.groups], draw.zero_variance_digests) for draw in draws],
    )


async def apply(store: GroupStore, operation: tuple[Any, ...]) -> object:
    match operation:
        case ("put", number):
            return (await store.put(*ENTRIES[number])).sequence
        case ("draw", step, numbers):
            with_signal = [ENTRIES[number][0] for number in numbers if number != 7]
            zero_variance: tuple[Digest, ...] = (ENTRIES[7][0].digest,) if 7 in numbers else ()
            groups = tuple(DrawnGroup(scored=scored, age_steps=0, use=1) for scored in with_signal)
            return await store.record_draw(
                Draw(
                    step=step, groups=groups, num_zero_variance=len(zero_variance), zero_variance_digests=zero_variance
                )
            )
        case ("abandon", first, last):
            return await store.abandon(first, last)
        case ("forget", before_s, num_groups, from_step, numbers):
            keep = [ENTRIES[number][1].digest for number in numbers]
            return await store.forget(float(before_s), num_groups * SIZE_BYTES, from_step, keep)
        case _:
            return None


async def run(operations: list[tuple[Any, ...]], path: Path) -> None:
    clock = ManualClock()
    memory = MemoryGroupStore(clock, 10**6)
    sqlite = await SqliteGroupStore.open(path, clock, 10**6)
    ever_put: set[Digest] = set()
    for operation in operations:
        if operation[0] == "reopen":
            await sqlite.close()
            sqlite = await SqliteGroupStore.open(path, clock, 10**6)
        assert await apply(memory, operation) == await apply(sqlite, operation), operation
        if operation[0] == "put":
            ever_put.add(ENTRIES[operation[1]][1].digest)
        assert await observe(memory) == await observe(sqlite), operation
        assert all([await sqlite.contains(digest) for digest in ever_put])
    await sqlite.close()


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS)
def test_both_stores_agree_and_never_forget_a_digest(operations: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(operations, Path(folder) / "groups.sqlite"))
