"""Shares of the draws: whoever sends whatever, in any order, no window of places has more of anybody than its share."""

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.clock import ManualClock
from swarm.config import EntryConfig, ReplayConfig
from swarm.exchange.draw_shares import LEAST_BOUND, WINDOW, DrawShares
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.testing.builders import make_group, make_identity, make_scored
from swarm.types import Draw, DrawPlace, PolicyVersion, RolloutGroup

OWN = make_identity(1000).node_id
MEMBERS = tuple(make_identity(1100 + number).node_id for number in range(9))
REWARDS = [1.0, 0.0] * 4
NEWCOMERS = tuple(make_identity(1200 + number).node_id for number in range(9))


class Bench:
    """One buffer of an open run, and every place that its draws had."""

    def __init__(self, num_members: int, local: int, external: int, max_groups: int = 300) -> None:
        self.config = ReplayConfig(
            local_groups=local, external_groups=external, max_age_steps=1000, max_groups=max_groups
        )
        rule = EntryRule(EntryConfig(members=MEMBERS[:num_members]), "local", ManualClock())
        self.parties = Parties(rule)
        self.buffer = ReplayBuffer(self.config, OWN, 0, ManualClock(), DrawShares(self.parties))
        self.num_made, self.step = 0, 0
        self.places: list[DrawPlace] = []
        self.drawn: Counter[str] = Counter()  # groups by producer

    def add(self, producer: str, count: int = 1, *, follows: bool = False, task_id: int | None = None) -> None:
        for _ in range(count):
            self.num_made += 1
            group = _group_of(OWN if follows else producer)
            made = replace(group, producer=producer, task_id=self.num_made if task_id is None else task_id)
            digest = hashlib.sha256(str(self.num_made).encode()).digest()
            scored = make_scored(made, digest=digest, rewards=REWARDS, is_made_here=producer == OWN)
            self.buffer.add(scored)

    def draw(self) -> Draw | None:
        draw = self.buffer.draw(self.step + 1, PolicyVersion(policy_id=OWN, step=0), _head, {})
        if draw is not None:
            self.step += 1
            self.places += draw.places
            self.drawn.update(drawn.scored.group.producer for drawn in draw.groups)
        return draw

    def windows(self) -> Iterator[Sequence[DrawPlace]]:
        """Every window of consecutive places."""
        for end in range(1, len(self.places) + 1):
            yield self.places[max(0, end - WINDOW) : end]


@functools.cache
def _group_of(policy_id: str) -> RolloutGroup:
    return make_group(policy_id)


def _head(policy_id: str) -> PolicyVersion:
    return PolicyVersion(policy_id=policy_id, step=0)


def most_of_newcomers(bench: Bench) -> int:
    return max((sum(place.is_newcomer for place in window) for window in bench.windows()), default=0)


PRODUCERS = st.sampled_from([("member", number) for number in range(9)] + [("newcomer", number) for number in range(9)])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PRODUCERS, st.integers(1, 12), st.booleans()),
        st.tuples(st.just("draw"), st.integers(1, 12)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans(), EVENTS)
def test_no_window_has_more_than_an_eighth_of_newcomers_nor_more_than_its_share_of_one_member(
    num_members: int, local: int, external: int, is_generator: bool, events: list[Any]
) -> None:
    if local + external == 0:
        return
    bench = Bench(num_members, local, external)
    for event in events:
        if event[0] == "add":
            (kind, number), count, follows = event[1:]
            bench.add((MEMBERS if kind == "member" else NEWCOMERS)[number], count, follows=follows)
            continue
        for _ in range(event[1]):
            if is_generator:
                bench.add(OWN, local)
            bench.draw()
    assert most_of_newcomers(bench) <= WINDOW / 8
    since = [index for index, place in enumerate(bench.places) if place.is_newcomer]
    assert all(after - before >= 8 for before, after in pairwise(since)), "nor do they come in bursts"
    listed = set(MEMBERS[:num_members])
    assert all(place.is_newcomer != (place.producer in listed) for place in bench.places if place.producer)
    others = [place.producer for place in bench.places if place.producer]
    assert Counter(others) == Counter({k: v for k, v in bench.drawn.items() if k != OWN})


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(2, 12), st.integers(1, 3), st.integers(1, 8))
def test_a_member_that_floods_has_its_share_among_members_that_take_part(
    num_members: int, external: int, count: int, every: int
) -> None:
    bench = Bench(num_members, 1, external)
    every = min(every, WINDOW // 2 // external)  # who takes no place in a whole window takes no part
    flood, *others = MEMBERS[:num_members]
    share = max(LEAST_BOUND, -(-WINDOW // num_members))
    for _ in range(3 * WINDOW // external + 3):
        bench.add(OWN)
        bench.add(flood, 2 * external)
        for member in others:
            bench.add(member, count if bench.step % every == 0 else 0)
        bench.draw()
    for window in bench.windows():
        assert sum(place.producer == flood for place in window) <= share


@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("external", [1, 2, 4, 11])
def test_members_that_all_deliver_fill_every_place_in_equal_shares(num_members: int, external: int) -> None:
    bench = Bench(num_members, 1, external)
    for _ in range(6 * WINDOW // external):
        bench.add(OWN)
        for member in MEMBERS[:num_members]:
            bench.add(member, external)
        draw = bench.draw()
        assert draw is not None and len(draw.groups) == 1 + external, "no place stays free"
    counts = [bench.drawn[member] for member in MEMBERS[:num_members]]
    mean = sum(counts) / num_members
    assert all(abs(count - mean) <= 4 * mean**0.5 + 2 for count in counts), counts


FEWEST_OTHERS = 2  # members that are not hostile, for each one that is


@settings(deadline=None, max_examples=8)
@example(9, 3, 8, 0, False)
@given(st.integers(3, 9), st.integers(1, 3), st.integers(4, 12), st.integers(0, 2**32), st.booleans())
def test_members_that_send_one_task_for_ever_have_few_places_of_it(
    num_members: int, num_hostile: int, places: int, seed: int, follows: bool
) -> None:
    num_hostile = min(num_hostile, num_members // (1 + FEWEST_OTHERS))
    most = most_of_one_task(num_members, num_hostile, places, seed, follows=follows)
    assert most <= 3 * num_hostile, "of 64 places"


def most_of_one_task(num_members: int, num_hostile: int, places: int, seed: int, *, follows: bool) -> int:
    """Groups of task 0 in the window that has most of them, once a window is full; others send any of 10^6 tasks."""
    bench = Bench(num_members, places if follows else 1, 0 if follows else places)
    rng = random.Random(seed)
    for _ in range(4 * WINDOW // places + 1):
        if not follows:
            bench.add(OWN)
        for number, member in enumerate(MEMBERS[:num_members]):
            for _ in range(rng.randint(0, 4)):
                is_hostile = number < num_hostile
                bench.add(member, follows=follows, task_id=0 if is_hostile else rng.randrange(1, 10**6))
        bench.draw()
    whole = list(bench.windows())[2 * WINDOW :]
    return max((sum(place.task[1] == 0 for place in window if place.producer) for window in whole), default=0)


@pytest.mark.parametrize("num_tasks", [1, 2, 4, 8, 16, 64, 300, 10**6])
@pytest.mark.parametrize("num_members", [1, 3, 9])
@pytest.mark.parametrize("follows", [False, True], ids=["external", "followers"])
def test_a_run_of_few_tasks_goes_on_as_one_of_many(num_tasks: int, num_members: int, follows: bool) -> None:
    bench = Bench(num_members, 8 if follows else 1, 0 if follows else 8)
    rng = random.Random(num_tasks)
    for _ in range(64):
        if not follows:
            bench.add(OWN, task_id=rng.randrange(num_tasks))
        for member in MEMBERS[:num_members]:
            for _ in range(-(-12 // num_members)):
                bench.add(member, follows=follows, task_id=rng.randrange(num_tasks))
        bench.draw()
    places = bench.places[8:]
    assert len(places) >= 0.9 * 8 * 64
    assert sum(bool(place.producer) for place in places) >= 0.9 * len(places)


@pytest.mark.parametrize("num_keys", [1, 10, 100, 1000])
def test_free_keys_never_have_more_than_an_eighth_however_many_and_however_honest_before(num_keys: int) -> None:
    keys = [f"{number:064x}" for number in range(num_keys)]
    bench = Bench(2, 2, 2, max_groups=2000)
    for turn in range(150):
        bench.add(OWN, 2)
        for member in MEMBERS[:2]:
            bench.add(member, 1 if turn < 50 else turn % 2)  # and less than before, later
        for number in range(max(4, num_keys // 20)):
            bench.add(keys[(turn * 50 + number) % num_keys])
        bench.draw()
    share = sum(bench.drawn[key] for key in keys) / (2 * bench.step)  # of the places
    assert most_of_newcomers(bench) <= WINDOW / 8 and 0.1 < share <= 0.13
