"""Choosing questions: totals, bounds and order, for any history."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.objectives.methods.fg_expo import GaussianAccuracy
from swarm.objectives.methods.reinforce_ada import SuccessiveElimination
from swarm.objectives.methods.rollout_gdro import RobustCounts, best_counts
from swarm.objectives.part import PromptPart
from swarm.objectives.parts.prompts import Bins

KEYS = st.integers(0, 12).map(lambda number: f"sums/{number}")
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=16)
HISTORY = st.lists(st.tuples(KEYS, REWARDS), max_size=40)
PARTS = [GaussianAccuracy(remembers=5), RobustCounts(remembers=5, k=2), SuccessiveElimination()]


@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=60, deadline=None)
@given(history=HISTORY, keys=st.lists(KEYS, min_size=1, max_size=8), group_size=st.integers(2, 12))
def test_choices_are_sound_after_any_history(part: PromptPart, history: Any, keys: list[str], group_size: int) -> None:
    memory = part.initial()
    for key, rewards in history:
        memory = part.seen(memory, key, rewards)
    assert json.loads(json.dumps(memory)) == memory, "not plain data"
    odds = part.odds(memory, keys)
    assert len(odds) == len(keys) and all(weight >= 0 for weight in odds) and sum(odds) > 0
    largest = 2 * group_size
    counts = part.counts(memory, keys, group_size, largest)
    assert sum(counts) == group_size * len(keys) or (isinstance(part, RobustCounts) and len(keys) < part.pool)
    assert all(2 <= count <= largest for count in counts)
    for value in memory.values():
        assert len(value) <= 10, "it remembers more than it may"


@settings(max_examples=200, deadline=None)
@given(rewards=REWARDS, group_size=st.integers(2, 8), spare=st.integers(0, 40), data=st.data())
def test_rounds_end_within_the_largest_group(rewards: list[float], group_size: int, spare: int, data: Any) -> None:
    part = data.draw(st.builds(SuccessiveElimination, rounds=st.integers(1, 5), keep=st.integers(2, 8)))
    drawn, largest = rewards[:group_size], group_size + spare
    for _ in range(part.rounds + 1):
        more = part.missing(drawn, group_size, largest)
        assert more <= group_size
        if more <= 0:
            break
        drawn = drawn + data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=more, max_size=more))
        assert len(drawn) <= largest
    assert part.missing(drawn, group_size, largest) <= 0


@settings(max_examples=200, deadline=None)
@given(
    variances=st.lists(st.floats(0, 0.25), min_size=1, max_size=10),
    least=st.integers(1, 3),
    room=st.integers(0, 9),
    data=st.data(),
)
def test_no_response_moved_to_another_prompt_lowers_the_variance(
    variances: list[float], least: int, room: int, data: Any
) -> None:
    most = least + room
    total = data.draw(st.integers(least * len(variances), most * len(variances)))
    counts = best_counts(variances, total, least, most)
    assert sum(counts) == total and all(least <= count <= most for count in counts)
    for giver, taker in ((i, j) for i in range(len(counts)) for j in range(len(counts)) if i != j):
        if counts[giver] > least and counts[taker] < most:
            lost = variances[giver] / (counts[giver] - 1) - variances[giver] / counts[giver]
            gained = variances[taker] / counts[taker] - variances[taker] / (counts[taker] + 1)
            assert gained <= lost + 1e-12


@given(history=st.lists(st.tuples(KEYS, st.floats(0, 1), st.integers(1, 8)), max_size=30))
def test_the_table_holds_the_prompts_seen_last(history: list[tuple[str, float, int]]) -> None:
    bins = Bins(num_bins=10, k=4, window=3, margin=0.05, limit=4)
    table: Any = {}
    for key, reward, count in history:
        table = bins.with_group(table, key, reward, count)
    newest = list(dict.fromkeys(key for key, _, _ in reversed(history)))[:4]
    assert list(reversed(table)) == newest
    assert all(len(entry["groups"]) <= 3 and 0 <= entry["bin"] <= 9 for entry in table.values())
