"""Limits that hold for every sequence of events: buckets in any window, tables against a simple model."""

from hypothesis import given
from hypothesis import strategies as st

from swarm.flow import BoundedTable, TokenBucket

gaps = st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=60)  # eighths of a second: exact in floats
rates = st.sampled_from([0.5, 1.0, 4.0])  # per second


@given(gaps, rates, st.integers(min_value=1, max_value=8), st.booleans())
def test_no_window_lets_more_through_than_burst_and_rate_allow(
    gaps: list[int], per_s: float, burst: int, is_spent: bool
) -> None:
    bucket, now_s, passed_s = TokenBucket(per_s, float(burst), 0.0), 0.0, list[float]()
    for gap in gaps:
        now_s += gap / 8
        if bucket.spend(now_s) if is_spent else bucket.try_take(now_s):
            passed_s.append(now_s)
    for first, since_s in enumerate(passed_s):
        for last, until_s in enumerate(passed_s[first:], start=first):
            assert last - first + 1 <= burst + per_s * (until_s - since_s)


@given(gaps, rates, st.integers(min_value=1, max_value=8))
def test_a_caller_within_the_rate_is_never_refused(gaps: list[int], per_s: float, burst: int) -> None:
    bucket, now_s = TokenBucket(per_s, float(burst), 0.0), 0.0
    for gap in gaps:
        now_s += 1.0 / per_s + gap / 8
        assert bucket.spend(now_s)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers())), st.integers(min_value=1, max_value=6))
def test_a_bounded_table_holds_the_keys_that_were_set_last(entries: list[tuple[int, int]], limit: int) -> None:
    table, model = BoundedTable[int, int](limit), list[tuple[int, int]]()
    for key, value in entries:
        table[key] = value
        model = [*(entry for entry in model if entry[0] != key), (key, value)][-limit:]
        assert list(table.items()) == model
