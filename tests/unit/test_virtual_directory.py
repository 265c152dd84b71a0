"""The directory in memory keeps the promises of Discovery; records and storage stay bounded under a flood."""

import dataclasses
import math

import pytest

from swarm.clock import ManualClock
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.dht_records import RecordChecker, ShardRecords, shard_of
from swarm.simulate.virtual.directory import MemoryDirectory
from swarm.types import Advert, Correction, Cursor, PolicyVersion, Role
from swarm.wire.adverts import seal_advert

ALICE, BOB = Identity.from_seed(b"a" * 32), Identity.from_seed(b"b" * 32)


def advert_of(
    identity: Identity, clock: ManualClock, ttl_s: float = 90.0, step: int = 1, run_id: str = "run"
) -> Advert:
    return Advert(
        node_id=identity.node_id,
        run_id=run_id,
        endpoints=("127.0.0.1:4000",),
        roles=(Role.TRAINER,),
        tokenizer_digest=bytes(32),
        head=PolicyVersion(policy_id=identity.node_id, step=step),
        oldest_step=0,
        num_groups=3,
        reward_mean=0.5,
        reward_std=0.25,
        correction=Correction.EXACT,
        held_bytes=1000,
        cursor=Cursor(epoch="e", sequence=7),
        expires_at_s=clock.now_s() + ttl_s,
    )


async def test_adverts_are_seen_replaced_and_expire() -> None:
    clock = ManualClock()
    directory = MemoryDirectory(clock)
    alice, bob = directory.view(ALICE, "run", clock), directory.view(BOB, "run", clock)
    assert await bob.lookup() == []
    await alice.announce(advert_of(ALICE, clock))
    await bob.announce(advert_of(BOB, clock))
    assert {a.node_id for a in await alice.lookup()} == {ALICE.node_id, BOB.node_id}
    clock.advance(60.0)
    await alice.announce(advert_of(ALICE, clock, step=2))
    clock.advance(60.0)
    assert [(a.node_id, a.head.step) for a in await bob.lookup()] == [(ALICE.node_id, 2)]


async def test_other_runs_and_the_far_side_of_a_partition_are_not_seen() -> None:
    clock, cut = ManualClock(), True
    directory = MemoryDirectory(clock, can_see=lambda reader, author: not cut)
    alice, bob = directory.view(ALICE, "run", clock), directory.view(BOB, "run", clock)
    other = directory.view(BOB, "other", clock)
    await alice.announce(advert_of(ALICE, clock))
    assert await bob.lookup() == []
    assert [a.node_id for a in await alice.lookup()] == [ALICE.node_id]
    cut = False
    assert [a.node_id for a in await bob.lookup()] == [ALICE.node_id]
    assert await other.lookup() == []


async def test_the_clock_of_one_reader_takes_no_advert_from_the_others() -> None:
    clock, fast = ManualClock(), ManualClock(1_700_003_600.0)
    directory = MemoryDirectory(clock)
    alice, bob = directory.view(ALICE, "run", clock), directory.view(BOB, "run", fast)
    await alice.announce(advert_of(ALICE, clock))
    assert await bob.lookup() == []
    assert len(await alice.lookup()) == 1
    clock.advance(1000.0)
    assert await alice.lookup() == [] and not directory.adverts


async def test_only_the_own_advert_of_the_run_with_a_sane_expiry_may_be_announced() -> None:
    clock = ManualClock()
    view = MemoryDirectory(clock).view(ALICE, "run", clock)
    for wrong in (
        advert_of(BOB, clock),
        advert_of(ALICE, clock, run_id="other"),
        advert_of(ALICE, clock, ttl_s=301),
        advert_of(ALICE, clock, ttl_s=-1),
        dataclasses.replace(advert_of(ALICE, clock), expires_at_s=math.nan),
    ):
        with pytest.raises(AssertionError):
            await view.announce(wrong)


async def test_after_stop_a_view_is_unavailable_and_its_advert_stays_until_it_expires() -> None:
    clock = ManualClock()
    directory = MemoryDirectory(clock)
    alice, bob = directory.view(ALICE, "run", clock), directory.view(BOB, "run", clock)
    await alice.announce(advert_of(ALICE, clock))
    await alice.stop()
    for call in (alice.announce(advert_of(ALICE, clock)), alice.lookup(), alice.maintain()):
        with pytest.raises(Unavailable):
            await call
    assert len(await bob.lookup()) == 1
    clock.advance(91.0)
    assert await bob.lookup() == []


def test_a_record_opens_only_with_its_own_key_shard_expiry_and_run() -> None:
    clock = ManualClock()
    checker, advert = RecordChecker("run", 8, clock), advert_of(ALICE, clock)
    data, until_s, shard = seal_advert(advert, ALICE), advert.expires_at_s, shard_of(ALICE.public_key, 8)
    assert checker.open(shard, ALICE.public_key, data, until_s) == advert
    for wrong in (
        (shard ^ 1, ALICE.public_key, data, until_s),
        (shard_of(BOB.public_key, 8), BOB.public_key, data, until_s),
        (shard, ALICE.public_key, data, until_s + 1),
        (shard, ALICE.public_key, data, math.nan),
        (shard, ALICE.public_key, data, math.inf),
        (shard, ALICE.public_key, data[:-1] + bytes([data[-1] ^ 1]), until_s),
        (shard, ALICE.public_key, data + bytes(2000), until_s),
    ):
        assert checker.open(*wrong) is None, wrong
    assert RecordChecker("other", 8, clock).open(shard, ALICE.public_key, data, until_s) is None
    clock.advance(91.0)
    assert checker.open(shard, ALICE.public_key, data, until_s) is None


def test_a_flood_of_new_keys_spends_only_their_allowance() -> None:
    clock = ManualClock()
    checker = RecordChecker("run", 1, clock)
    first = advert_of(ALICE, clock)
    assert checker.open(0, ALICE.public_key, seal_advert(first, ALICE), first.expires_at_s) is not None
    forged = seal_advert(first, ALICE)[:-1] + b"\0"
    for number in range(1000):
        assert checker.open(0, number.to_bytes(32, "big"), forged, first.expires_at_s) is None
    assert checker.num_deferred > 700
    bob = advert_of(BOB, clock)
    assert checker.open(0, BOB.public_key, seal_advert(bob, BOB), bob.expires_at_s) is None  # a new key has to wait
    newer = advert_of(ALICE, clock, ttl_s=95.0)
    assert checker.open(0, ALICE.public_key, seal_advert(newer, ALICE), newer.expires_at_s) == newer
    clock.advance(1.0)
    assert checker.open(0, BOB.public_key, seal_advert(bob, BOB), bob.expires_at_s) == bob


def test_a_full_records_keeps_its_first_half_and_never_grows() -> None:
    records = ShardRecords(capacity=128)
    early = [f"early {number}".encode() for number in range(64)]
    assert all(records.put(author, b"", 100.0, 0.0) for author in early)
    taken = [records.put(f"flood {number}".encode(), b"", 100.0, 0.0) for number in range(20_000)]
    assert len(records) == 128 and 64 < sum(taken) < 1000
    kept = dict(records.items(0.0))
    assert set(early) <= set(kept)
    assert all(records.put(author, b"new", 200.0, 0.0) for author in early)
    assert {author for author, _ in records.items(150.0)} == set(early)
    assert not records.put(early[0], b"older", 199.0, 150.0)
    assert not list(records.items(201.0))
