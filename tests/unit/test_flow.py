"""Signals wake who waits, backoff grows within its bounds, buckets keep their rate, tables a bound."""

import asyncio
import random

import pytest

from swarm.flow import Backoff, BoundedTable, DecayingSums, RateLimiter, RunningMean, Signal, TokenBucket
from swarm.simulate.virtual.loop import run_virtual


async def test_a_waiter_wakes_when_its_condition_holds_and_not_before() -> None:
    signal, values = Signal(), list[int]()
    waiting = asyncio.create_task(signal.until(lambda: len(values) == 2))
    for value in (1, 2):
        await asyncio.sleep(0)
        assert not waiting.done()
        values.append(value)
        signal.fire()
    await waiting


async def test_a_fire_without_waiters_is_not_kept_and_a_cancelled_waiter_leaves_nothing() -> None:
    signal = Signal()
    signal.fire()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    signal.fire()
    assert not signal._waiters


def test_backoff_doubles_up_to_its_longest_and_starts_again_after_a_success() -> None:
    backoff = Backoff(None, first_s=1.0, longest_s=5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_jitter_takes_at_most_half_and_equal_seeds_give_equal_waits() -> None:
    first, second = (Backoff(random.Random(7), first_s=8.0, longest_s=8.0) for _ in range(2))
    waits = [first.next_s() for _ in range(100)]
    assert waits == [second.next_s() for _ in range(100)]
    assert all(4.0 <= wait_s <= 8.0 for wait_s in waits) and max(waits) - min(waits) > 3.0


def test_backoff_sleeps_for_its_waits() -> None:
    async def elapsed_s() -> float:
        loop, backoff = asyncio.get_running_loop(), Backoff(None, first_s=3.0)
        began_s = loop.time()
        await backoff.wait()
        await backoff.wait()
        return loop.time() - began_s

    assert run_virtual(elapsed_s()) == pytest.approx(9.0)


def test_a_bucket_is_full_at_first_and_refills_evenly() -> None:
    bucket = TokenBucket(per_s=2.0, burst=3.0, at_s=0.0)
    assert [bucket.try_take(0.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.try_take(0.25) and bucket.try_take(0.5)
    assert [bucket.try_take(100.0) for _ in range(4)] == [True, True, True, False], "no more than the burst is saved"


def test_spending_above_the_rate_is_refused_until_there_is_a_pause() -> None:
    bucket = TokenBucket(per_s=1.0, burst=1.0, at_s=0.0)
    assert bucket.spend(0.0)
    assert not any(bucket.spend(0.5 * number) for number in range(1, 20)), "each refused call costs what was left"
    assert bucket.spend(10.5)


def test_every_key_has_a_bucket_of_its_own_and_the_keys_are_bounded() -> None:
    limiter = RateLimiter[str](per_s=1.0, burst=1.0, max_keys=2)
    assert limiter.try_take("a", 0.0) and not limiter.try_take("a", 0.0) and limiter.spend("b", 0.0)
    assert limiter.try_take("c", 0.0) and len(limiter) == 2
    assert limiter.try_take("a", 0.0), "forgotten, so new"


def test_a_table_forgets_the_entry_that_was_set_longest_ago() -> None:
    table = BoundedTable[str, int](limit=3)
    for number in range(5):
        table[f"peer {number}"] = number
        table["peer 0"] = number
    assert table == {"peer 3": 3, "peer 4": 4, "peer 0": 4} and list(table)[-1] == "peer 0"


def test_no_way_of_setting_an_entry_escapes_the_bound_of_a_table() -> None:
    table = BoundedTable[str, int](limit=2)
    table.update(a=1, b=2, c=3)
    assert table == {"b": 2, "c": 3}
    assert (table.setdefault("b", 7), table.setdefault("d", 4)) == (2, 4) and table == {"c": 3, "d": 4}
    table |= {"e": 5, "f": 6, "g": 7}
    assert type(table) is BoundedTable and table == {"f": 6, "g": 7}


def test_a_running_mean_begins_with_its_first_value() -> None:
    mean = RunningMean(memory=0.75)
    assert mean.value is None
    mean.add(4.0)
    assert mean.value == 4.0
    mean.add(8.0)
    assert mean.value == 5.0


def test_a_sum_halves_every_half_life() -> None:
    sums = DecayingSums[str](half_life_s=10.0, max_keys=2)
    sums.add("a", 1.0, 0.0)
    sums.add("a", 1.0, 10.0)
    assert sums.of("a", 10.0) == 1.5 and sums.of("a", 20.0) == 0.75 and sums.of("b", 5.0) == 0.0
