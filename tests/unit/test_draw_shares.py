"""Shares of the draws in particular cases: tasks, restarts, groups without log-probs, and followers that stall."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.clock import ManualClock
from swarm.config import EntryConfig, ReplayConfig
from swarm.exchange.draw_shares import WINDOW, DrawShares
from swarm.exchange.group_store import SqliteGroupStore
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.interfaces import GroupStore
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.peers.quotas import TaskQuota
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_group, make_identity, make_scored
from swarm.types import Correction, Draw, PolicyVersion, ScoredGroup

OWN = "own"
ADA, BELL, CURIE = (make_identity(number).node_id for number in range(1, 4))
NEW = make_identity(9).node_id


class Bench:
    """One buffer of an open run of three members, or of a private run."""

    def __init__(self, *, is_private: bool = False, **settings: object) -> None:
        self.config = ReplayConfig.model_validate({"local_groups": 1, "external_groups": 4, **settings})
        rule = EntryRule(EntryConfig(members=(ADA, BELL, CURIE)), "local", ManualClock())
        self.shares = DrawShares(Parties(None if is_private else rule), self.config.max_reuse)
        self.buffer = ReplayBuffer(self.config, OWN, 0, ManualClock(), self.shares)
        self.num_made, self.step = 0, 0

    def scored(
        self, producer: str, *, follows: bool = False, task_id: int = 0, correction: Correction = Correction.EXACT
    ) -> ScoredGroup:
        self.num_made += 1
        group = make_group(OWN if follows else producer, task_id=task_id or 1000 + self.num_made)
        digest = self.num_made.to_bytes(32, "big")
        return make_scored(
            replace(group, producer=producer),
            digest=digest,
            rewards=[1.0, 0.0] * 4,
            is_made_here=producer == OWN,
            correction=correction,
        )

    def add(self, producer: str, count: int = 1, **what: object) -> int:
        """Adds groups, and returns the number held."""
        return sum(self.buffer.add(self.scored(producer, **what)) for _ in range(count))  # type: ignore[arg-type]

    def draw(self) -> Draw | None:
        self.step += 1
        return self.buffer.draw(self.step, PolicyVersion(policy_id=OWN, step=0), _head, {})


def _head(policy_id: str) -> PolicyVersion:
    return PolicyVersion(policy_id=policy_id, step=0)


def producers(draw: Draw | None) -> list[str]:
    return [] if draw is None else [drawn.scored.group.producer for drawn in draw.groups]


async def open_store(folder: Path) -> GroupStore:
    return await SqliteGroupStore.open(folder / "groups.sqlite", ManualClock(), 2**20)


def test_one_task_has_one_place_in_eight_and_one_group_of_it_waits_of_each_party() -> None:
    bench = Bench(external_groups=8)
    bench.add(CURIE, 60)
    assert bench.add(ADA, 5, task_id=7) == 1 and bench.add(BELL, 5, task_id=7) == 1
    bench.add(OWN)
    drawn = bench.draw()
    assert drawn is not None
    tasks = [group.scored.group.task_id for group in drawn.groups if not group.scored.is_made_here]
    assert len(tasks) == 8 and tasks.count(7) == 2, "two of nine places"


async def draw_one_of_task_7(bench: Bench, store: GroupStore) -> None:
    """The last of six draws, so that the window is long enough to tell that tasks hardly repeat."""
    for number in range(6):
        bench.add(OWN)
        bench.add(BELL, 2)
        bench.add(CURIE, 1 if number == 5 else 2)
        bench.add(ADA, number // 5, task_id=7)
        draw = bench.draw()
        assert draw is not None and len(draw.groups) == 5
        await store.record_draw(draw)


async def test_a_party_has_one_group_of_a_task_in_a_window_also_after_a_restart(tmp_path: Path) -> None:
    before, store = Bench(), await open_store(tmp_path)
    await draw_one_of_task_7(before, store)
    await store.close()
    bench, store = Bench(), await open_store(tmp_path)
    bench.num_made = before.num_made
    bench.shares.restore(await store.places(WINDOW))
    assert bench.add(ADA, 1, task_id=7) == 0
    assert bench.add(ADA, 1, task_id=8) == bench.add(BELL, 1, task_id=7) == 1
    for _ in range(WINDOW // 4):
        bench.add(OWN)
        bench.add(BELL, 4)
        bench.draw()
    assert bench.add(ADA, 1, task_id=7) == 1, "a window later"
    await store.close()


def test_a_group_that_is_used_again_counts_once_for_its_task() -> None:
    bench = Bench(max_reuse=6)
    bench.add(CURIE, 60)
    bench.add(ADA, 1, task_id=7)
    num_drawn = 0
    for _ in range(6):
        bench.add(OWN)
        num_drawn += producers(bench.draw()).count(ADA)
    assert num_drawn == 6


def test_a_group_without_log_probs_is_a_newcomers_whoever_made_it() -> None:
    bench = Bench()
    bench.add(ADA, 8, correction=Correction.NO_LOGPROBS)
    bench.add(BELL, 1)
    bench.add(OWN)
    draw = bench.draw()
    assert draw is not None
    assert sorted(producers(draw)) == sorted([OWN, ADA, BELL])
    assert {drawn.scored.group.producer: drawn.is_established for drawn in draw.groups} == {
        OWN: True,
        ADA: False,
        BELL: True,
    }


@pytest.mark.parametrize("follows", [False, True])
def test_in_a_private_run_groups_without_log_probs_have_an_eighth_of_the_places_and_others_have_no_bound(
    follows: bool,
) -> None:
    bench = Bench(is_private=True, local_groups=8 if follows else 1, external_groups=0 if follows else 7)
    drawn = Counter[str]()
    for _ in range(24):
        bench.add(OWN, 0 if follows else 1)
        bench.add(NEW, 8, follows=follows, correction=Correction.NO_LOGPROBS)
        bench.add(BELL, 8, follows=follows)
        drawn.update(producers(bench.draw()))
    num_places = 24 * (bench.config.local_groups + bench.config.external_groups) - drawn[OWN]
    assert 0 < drawn[NEW] <= -(-num_places // 8)
    assert drawn[BELL] == num_places - drawn[NEW], "one party alone, and no place stays free"


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_restart_gives_nobody_a_fresh_window(is_restarted: bool) -> None:
    bench, store = Bench(local_groups=1, external_groups=1), MemoryGroupStore(ManualClock(), 2**20)

    async def draw() -> Draw:
        bench.add(OWN)
        bench.add(NEW)
        draw = bench.draw()
        assert draw is not None
        await store.record_draw(draw)
        return draw

    drawn = [await draw() for _ in range(20)]
    assert [NEW in producers(each) for each in drawn] == [number % 8 == 0 for number in range(20)]
    if is_restarted:
        before, bench = bench, Bench(local_groups=1, external_groups=1)
        bench.num_made, bench.step = before.num_made, before.step
        bench.shares.restore(await store.places(WINDOW))
    drawn = [await draw() for _ in range(20, 40)]
    assert [NEW in producers(each) for each in drawn] == [number % 8 == 0 for number in range(20, 40)]


def test_followers_that_are_all_newcomers_make_no_step() -> None:
    bench = Bench(local_groups=4, external_groups=0)
    bench.add(NEW, 8, follows=True)
    assert bench.draw() is None and bench.buffer.num_for_draws == 0


def test_newcomers_that_follow_keep_no_room_from_members() -> None:
    bench = Bench(local_groups=4, external_groups=0, max_age_steps=3)
    for number in range(50):
        bench.add(make_identity(100 + number).node_id, follows=True)
    assert bench.buffer.num_local == 2, "an eighth of the 16 that can be used"
    assert bench.buffer.capacity(0, running=0) == 14


def test_a_member_whose_fellow_died_goes_on_alone_after_a_window() -> None:
    bench = Bench(local_groups=4, external_groups=0, max_age_steps=3)
    for _ in range(10):
        bench.add(ADA, 2, follows=True)
        bench.add(BELL, 2, follows=True)
        assert sorted(producers(bench.draw())) == sorted([ADA, ADA, BELL, BELL])
    sizes: list[int] = []
    while len(sizes) < 30:  # Bell is gone
        bench.add(ADA, 4, follows=True)
        drawn = producers(bench.draw())
        sizes += [len(drawn)] if drawn else []
    assert min(sizes) >= 1 and set(sizes[:8]) <= {1, 2} and set(sizes[-5:]) == {4}


def test_a_member_that_delivers_a_little_stops_nobody() -> None:
    bench = Bench(local_groups=1, external_groups=0, max_age_steps=3)
    drawn: list[str] = []
    for turn in range(300):
        bench.add(ADA, 1, follows=True)
        if turn % 60 == 0:
            bench.add(BELL, 1, follows=True)
        drawn += producers(bench.draw())
    assert len(drawn) > 250


def test_the_local_ones_of_an_own_generator_are_no_places_of_others() -> None:
    bench = Bench(local_groups=4, external_groups=2)
    bench.add(OWN, 4)
    bench.add(ADA, 2)
    draw = bench.draw()
    assert draw is not None and [place.producer for place in draw.places] == [ADA, ADA]
    assert len(draw.groups) == 6


# --- a trainer without a generator stands still only where nobody may bring more ----------------


def num_draws(bench: Bench, *, turns: int = 300, until_alone: int = 20, num_tasks: int = 0) -> int:
    """Draws of so many turns: two members bring what they have credit for, and then only the first of them."""
    config, buffer, count = bench.config, bench.buffer, 0
    for turn in range(turns):
        capacity = buffer.capacity(0, running=0)
        if config.barrier:
            capacity = max(0, config.local_groups - buffer.num_for_draws - buffer.num_turned_away)
        for number in range(capacity):
            producer = BELL if number % 2 and turn < until_alone else ADA
            task_id = 1 + (7 * turn + number // 2) % num_tasks if num_tasks else 0
            bench.add(producer, follows=True, task_id=task_id)
        count += bench.draw() is not None
    return count


@pytest.mark.parametrize("tightened", [None, 0, 1, 2])
def test_a_tightened_age_bound_stops_no_trainer_whose_member_left(tightened: int | None) -> None:
    bench = Bench(local_groups=4, external_groups=4)
    bench.buffer.limit_age(tightened)
    assert num_draws(bench) > 290


@pytest.mark.parametrize("max_age_steps", [0, 4])
def test_rounds_go_on_when_a_member_leaves(max_age_steps: int) -> None:
    bench = Bench(local_groups=4, external_groups=0, barrier=True, max_age_steps=max_age_steps)
    assert num_draws(bench) > 290


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("until_alone", [20, 300])
@pytest.mark.parametrize("num_tasks", [1, 3, 5])
def test_a_run_of_few_tasks_goes_on(num_tasks: int, until_alone: int, barrier: bool) -> None:
    bench = Bench(local_groups=4, external_groups=4, barrier=barrier)
    assert num_draws(bench, num_tasks=num_tasks, until_alone=until_alone) > 140


def test_what_finds_no_place_takes_up_its_followers_room_until_the_next_draw() -> None:
    bench = Bench(local_groups=4, external_groups=0, max_age_steps=7)
    before = bench.buffer.capacity(0, running=0)
    bench.add(BELL, 15, follows=True)
    bench.add(ADA, 8, follows=True, task_id=7)
    assert bench.buffer.num_waiting(ADA) == 8 and bench.buffer.num_local == 15 + 1
    assert bench.buffer.capacity(0, running=0) == before - 23
    bench.add(BELL, 8, follows=True)
    assert bench.draw() is None, "Bell may bring one more"
    bench.add(BELL, 1, follows=True)
    assert bench.draw() is not None
    assert bench.buffer.num_turned_away == 0


def test_a_follower_that_sends_more_than_its_half_stops_nobody() -> None:
    bench = Bench(local_groups=4, external_groups=0, max_age_steps=3)
    bench.add(BELL, 1, follows=True)
    bench.add(ADA, 15, follows=True)
    assert bench.buffer.num_local == 9 and bench.buffer.capacity(0, running=0) == 0
    assert bench.draw() is not None


def test_what_is_left_of_a_task_follows_who_comes_to_wait() -> None:
    """With others that wait a member has an eighth of the places, so fewer of them for one task."""

    def left() -> int:
        return bench.shares.num_left_of_task(ADA, ("sort", 7), False, lambda: bench.buffer._held.producers)

    bench = Bench()
    bench.add(OWN)
    assert bench.add(ADA) and producers(bench.draw()) == [OWN, ADA]
    alone = left()
    bench.add(BELL)
    with_bell = left()
    bench.add(CURIE, follows=True)
    assert (
        alone
        > with_bell
        >= left()
        == bench.shares.begin(bench.buffer._held.producers, 0).num_left_of_task(ADA, ("sort", 7), False)
    )


def test_a_newcomers_group_does_not_move_the_bounds_of_tasks() -> None:
    quota = TaskQuota()
    quota.count("ada", ("sort", 7), 1)
    before = quota.share_of_one, quota.most_of_draw(8), quota.most_of_party(8)
    quota.count("", ("sort", 8), 1)
    assert (quota.share_of_one, quota.most_of_draw(8), quota.most_of_party(8)) == before
    quota.count("bell", ("sort", 8), 1)
    assert (quota.share_of_one, quota.most_of_draw(8), quota.most_of_party(8)) != before


@pytest.mark.parametrize("num_tasks", [1, 12, 64, 1000])
def test_a_party_with_ever_new_tasks_takes_no_places_from_others(num_tasks: int) -> None:
    """Six parties share four tasks; whatever a seventh one adds, they keep at least the places that they had."""
    quota = TaskQuota()
    for party in "abcdef":
        for task_id in range(4):
            quota.count(party, ("sort", task_id), 1)
    before = quota.most_of_party(8), quota.most_of_draw(8)
    for task_id in range(num_tasks):
        quota.count("evil", ("sort", 100 + task_id), 1)
    assert quota.most_of_party(8) >= before[0] and quota.most_of_draw(8) >= before[1]


@settings(max_examples=200)
@given(
    held=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6)), min_size=4, max_size=40, unique=True),
    gone=st.lists(st.integers(0, 39), max_size=20),
)
def test_the_bounds_of_what_is_left_are_those_of_a_new_count(held: list[tuple[str, int]], gone: list[int]) -> None:
    quota, left = TaskQuota(), list(held)
    for party, task_id in held:
        quota.count(party, ("sort", task_id), 1)
    for index in gone:
        if index < len(left) and len(left) > 1:
            party, task_id = left.pop(index)
            quota.count(party, ("sort", task_id), -1)
    anew = TaskQuota()
    for party, task_id in left:
        anew.count(party, ("sort", task_id), 1)
    assert quota.share_of_one == anew.share_of_one
    assert (quota._alone, quota._holders, quota._parties) == (anew._alone, anew._holders, anew._parties)
