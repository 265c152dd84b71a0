"""The replay buffer: what a draw holds, in which order, and what happens to the rest."""

from dataclasses import replace

import pytest

from swarm.clock import ManualClock
from swarm.config import ReplayConfig
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.exchange.replay_tables import held_bytes
from swarm.testing.builders import make_group, make_scored
from swarm.testing.outcomes import make_outcome
from swarm.types import PolicyVersion, ScoredGroup

OWN = "own"
WITH_SIGNAL, ZERO_VARIANCE = [1.0] * 4 + [0.0] * 4, [1.0] * 8


def make_buffer(**settings: object) -> ReplayBuffer:
    defaults: dict[str, object] = {"local_groups": 2, "external_groups": 2, "max_age_steps": 4}
    config = ReplayConfig.model_validate(defaults | settings)
    return ReplayBuffer(config, OWN, 0, ManualClock())


def local(task_id: int, step: int = 0, rewards: list[float] = WITH_SIGNAL, size_bytes: int = 1000) -> ScoredGroup:
    return make_scored(make_group(OWN, task_id=task_id, step=step), rewards=rewards, size_bytes=size_bytes)


def external(task_id: int, producer: str = "peer", step: int = 0, rewards: list[float] = WITH_SIGNAL) -> ScoredGroup:
    return make_scored(make_group(producer, task_id=task_id, step=step), rewards=rewards, is_made_here=False)


def by_follower(
    task_id: int, producer: str = "follower", step: int = 0, rewards: list[float] = WITH_SIGNAL
) -> ScoredGroup:
    group = make_group(OWN, task_id=task_id, step=step)
    return make_scored(replace(group, producer=producer), rewards=rewards, is_made_here=False)


def at(step: int, policy_id: str = OWN) -> PolicyVersion:
    return PolicyVersion(policy_id=policy_id, step=step)


def nobody(_: str) -> None:
    return None


def test_a_draw_waits_for_enough_local_groups_and_takes_the_oldest_first() -> None:
    buffer = make_buffer()
    groups = [local(i) for i in range(3)]
    buffer.add(groups[0])
    assert buffer.draw(1, at(0), nobody, {}) is None
    buffer.add(groups[1])
    buffer.add(groups[2])
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None
    assert [d.scored.digest for d in draw.groups] == [g.digest for g in groups[:2]]


def test_external_groups_join_up_to_their_number_and_never_delay_a_draw() -> None:
    buffer = make_buffer()
    for i in range(4):
        buffer.add(local(i))
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None and all(d.scored.is_made_here for d in draw.groups)
    for i in range(3):
        buffer.add(external(i))
    draw = buffer.draw(2, at(0), nobody, {})
    assert draw is not None and sum(not d.scored.is_made_here for d in draw.groups) == 2


def test_external_groups_without_signal_are_counted_and_not_kept() -> None:
    buffer = make_buffer()
    assert not buffer.add(external(1, rewards=ZERO_VARIANCE))
    assert buffer.num_groups == 0 and buffer.num_dropped == {"zero_variance_external": 1}


def test_local_groups_without_signal_count_toward_the_draw_and_are_named_in_it() -> None:
    buffer = make_buffer()
    zero_variance, with_signal = local(1, rewards=ZERO_VARIANCE), local(2)
    buffer.add(zero_variance)
    buffer.add(with_signal)
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None
    assert [d.scored.digest for d in draw.groups] == [with_signal.digest]
    assert draw.num_zero_variance == 1 and draw.zero_variance_digests == (zero_variance.digest,)


def test_a_draw_without_any_signal_is_used_up_and_named_in_the_next() -> None:
    buffer = make_buffer()
    zero_variance = [local(i, rewards=ZERO_VARIANCE) for i in range(2)]
    for group in zero_variance:
        buffer.add(group)
    assert buffer.draw(1, at(0), nobody, {}) is None
    assert buffer.num_local == 0
    buffer.add(local(8))
    buffer.add(local(9))
    draw = buffer.draw(1, at(0), nobody, {})
    assert (
        draw is not None
        and draw.num_zero_variance == 2
        and set(draw.zero_variance_digests) == {g.digest for g in zero_variance}
    )


def test_groups_without_signal_are_drawn_like_others_where_the_recipe_wants_them() -> None:
    buffer = make_buffer(keep_zero_variance=True)
    local_groups = [local(1, rewards=ZERO_VARIANCE), local(2)]
    for group in local_groups:
        buffer.add(group)
    assert buffer.add(external(3, rewards=ZERO_VARIANCE))
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None and draw.num_zero_variance == 0 and draw.zero_variance_digests == ()
    assert [d.scored.has_signal for d in draw.groups] == [False, True, False]
    assert buffer.num_dropped == {}


@pytest.mark.parametrize("keeps", [True, False])
def test_groups_whose_turns_alone_differ_are_drawn_where_the_recipe_wants_them(keeps: bool) -> None:
    buffer = make_buffer(keep_turn_signal=keeps)
    alike = (make_outcome(0.0, observations=("", ""), turn_rewards=(0.5, 0.5)),) * len(ZERO_VARIANCE)
    apart = (make_outcome(0.0, observations=("", ""), turn_rewards=(0.5, 0.25)), *alike[1:])
    for number, outcomes in enumerate((alike, apart), 1):
        buffer.add(replace(local(number, rewards=ZERO_VARIANCE), outcomes=outcomes))
        added = buffer.add(replace(external(number + 2, rewards=ZERO_VARIANCE), outcomes=outcomes))
        assert added is (keeps and outcomes is apart)
    buffer.add(local(9))
    buffer.add(local(10))
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None
    differing = [each.scored.has_turn_signal for each in draw.groups]
    assert sum(differing) == 2 * keeps
    assert draw.num_zero_variance == (1 if keeps else 2)


def test_silent_local_groups_do_not_hold_back_external_signal() -> None:
    buffer = make_buffer()
    for i in range(2):
        buffer.add(local(i, rewards=ZERO_VARIANCE))
    buffer.add(external(5))
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None and [d.scored.is_made_here for d in draw.groups] == [False] and draw.num_zero_variance == 2


def test_a_group_of_exactly_the_greatest_age_is_used_and_one_step_older_is_not() -> None:
    for head_step, is_used in ((4, True), (5, False)):
        buffer = make_buffer(local_groups=1)
        buffer.add(local(1, step=0))
        draw = buffer.draw(1, at(head_step), nobody, {})
        assert (draw is not None) is is_used
    assert buffer.num_dropped == {"too_old": 1}


def test_external_age_follows_the_producers_head_and_not_ours() -> None:
    heads = {"peer": at(30, "peer"), "late": at(99, "late")}
    buffer = make_buffer(local_groups=1, external_groups=4)
    buffer.add(local(1, step=500))
    buffer.add(external(2, "peer", step=27))
    buffer.add(external(3, "late", step=27))
    draw = buffer.draw(1, at(500), heads.get, {})
    assert draw is not None
    assert [(d.scored.group.producer, d.age_steps) for d in draw.groups] == [(OWN, 0), ("peer", 3)]


def test_a_group_is_not_used_after_its_seconds_whatever_its_steps() -> None:
    clock = ManualClock()
    buffer = ReplayBuffer(ReplayConfig(local_groups=1, max_age_s=10.0), OWN, 0, clock)
    buffer.add(local(1))
    clock.advance(10.5)
    assert buffer.draw(1, at(0), nobody, {}) is None
    assert buffer.num_dropped == {"too_old": 1}


def test_a_group_is_used_max_reuse_times_and_says_which_use_it_is() -> None:
    buffer = make_buffer(local_groups=1, max_reuse=2)
    buffer.add(local(1))
    uses = [draw.groups[0].use for step in (1, 2) if (draw := buffer.draw(step, at(0), nobody, {}))]
    assert uses == [1, 2] and buffer.draw(3, at(0), nobody, {}) is None


def test_a_flood_of_one_source_displaces_its_own_groups_and_never_local_ones() -> None:
    buffer = make_buffer(max_groups=10)
    buffer.add(local(1))
    buffer.add(external(2, "quiet"))
    for i in range(100):
        buffer.add(external(i, "flooder"))
    buffer.add(local(2))
    assert buffer.num_groups == 10 and buffer.num_local == 2 and buffer.num_dropped["evicted"] == 93
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None


def test_the_byte_bound_holds_and_a_group_beyond_it_is_dropped() -> None:
    one = held_bytes(local(0))
    buffer = make_buffer(max_bytes=int(2.5 * one))
    assert not buffer.add(make_scored(make_group(OWN, texts=["7" * 3 * one, *["x"] * 7]), rewards=WITH_SIGNAL))
    for i in range(5):
        buffer.add(local(i))
    assert buffer.num_bytes == 2 * one and buffer.num_dropped == {"too_large": 1, "evicted": 3}


def test_capacity_is_what_can_be_used_before_it_is_too_old() -> None:
    buffer = make_buffer(local_groups=4, max_age_steps=2)
    assert buffer.capacity(0, running=0) == 12
    assert buffer.capacity(0, running=5) == 7
    for i in range(6):
        buffer.add(local(i))
    assert buffer.capacity(0, running=5) == 1
    assert buffer.capacity(0, running=50) == 0
    assert buffer.capacity(3, running=0) == 12  # what waits is too old by then


def test_age_zero_is_strictly_on_policy() -> None:
    buffer = make_buffer(local_groups=2, max_age_steps=0)
    for i in range(2):
        assert buffer.capacity(0, running=0) == 2 - i
        buffer.add(local(i))
    assert buffer.capacity(0, running=0) == 0
    assert buffer.draw(1, at(0), nobody, {}) is not None
    assert buffer.draw(2, at(1), nobody, {}) is None


def test_a_tightened_age_bound_never_exceeds_the_configured_one() -> None:
    buffer = make_buffer(local_groups=1)
    for limit, bound in ((1, 1), (100, 4), (None, 4)):
        buffer.limit_age(limit)
        buffer.add(local(bound))
        assert buffer.draw(1, at(bound + 1), nobody, {}) is None
        buffer.add(local(bound))
        assert buffer.draw(1, at(bound), nobody, {}) is not None


def test_a_restart_brings_back_what_was_not_used_up() -> None:
    groups = [local(i, rewards=ZERO_VARIANCE if i == 1 else WITH_SIGNAL) for i in range(4)]
    buffer = make_buffer(max_reuse=2)
    buffer.restore({groups[0].digest: 2, groups[1].digest: 1, groups[2].digest: 1}, groups)
    draw = buffer.draw(9, at(0), nobody, {})
    assert draw is not None
    assert [(d.scored.digest, d.use) for d in draw.groups] == [(groups[2].digest, 2), (groups[3].digest, 1)]


@pytest.mark.parametrize("sampler", ["uniform", "fresh", "effective"])
def test_two_nodes_with_one_seed_draw_the_same(sampler: str) -> None:
    draws = []
    for order in (range(20), reversed(range(20))):
        buffer = make_buffer(local_groups=0, external_groups=5, sampler=sampler)
        for i in order:
            buffer.add(external(i, f"peer {i % 3}"))
        draw = buffer.draw(1, at(0), nobody, {"peer 0": 0.1})
        assert draw is not None
        draws.append([d.scored.digest for d in draw.groups])
    assert draws[0] == draws[1] and len(set(draws[0])) == 5


@pytest.mark.parametrize("rewards", [WITH_SIGNAL, ZERO_VARIANCE], ids=["too old", "without signal"])
def test_a_run_that_makes_no_draw_remembers_no_more_groups_than_a_restart_reads(rewards: list[float]) -> None:
    buffer = make_buffer(max_groups=10, local_groups=1, max_age_steps=1)
    for i in range(50):
        buffer.add(local(i, step=0, rewards=rewards))
        assert buffer.draw(1, at(9 if rewards is WITH_SIGNAL else 0), nobody, {}) is None
    buffer.add(local(99, step=9))
    draw = buffer.draw(2, at(9), nobody, {})
    assert draw is not None
    assert len({*draw.zero_variance_digests, *draw.too_old_digests}) == 10


def test_what_waits_stays_within_the_bytes_of_the_store_too() -> None:
    one = held_bytes(local(0))
    for max_stored_bytes, num_held in ((2000, 2), (10**6, 3)):
        config = ReplayConfig(local_groups=2, max_bytes=3 * one)
        buffer = ReplayBuffer(config, OWN, 0, ManualClock(), max_stored_bytes=max_stored_bytes)
        assert not buffer.add(local(9, size_bytes=max_stored_bytes + 1))
        for i in range(4):
            buffer.add(local(i, size_bytes=1000))
        assert buffer.num_bytes == num_held * one and buffer.fill == 1.0


def test_local_are_the_groups_of_the_own_lineage_whoever_made_them() -> None:
    buffer = make_buffer()
    own, theirs, other = local(1), by_follower(2), external(3)
    for group in (own, theirs, other):
        buffer.add(group)
    assert (buffer.num_local, buffer.num_external) == (2, 1)
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None
    assert [d.scored.digest for d in draw.groups] == [own.digest, theirs.digest, other.digest]


def test_followers_groups_are_counted_when_silent_and_take_up_capacity() -> None:
    buffer = make_buffer(max_age_steps=1)
    zero_variance = by_follower(1, rewards=ZERO_VARIANCE)
    assert buffer.add(zero_variance) and buffer.add(local(2))
    assert buffer.capacity(0, running=1) == 2 * 2 - 2 - 1
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None and draw.zero_variance_digests == (zero_variance.digest,) and draw.num_zero_variance == 1


def test_the_age_of_a_followers_group_counts_from_our_own_head() -> None:
    buffer = make_buffer(local_groups=1)
    buffer.add(by_follower(1, step=3))
    draw = buffer.draw(1, at(5), {OWN: at(100), "follower": at(50)}.get, {})
    assert draw is not None and draw.groups[0].age_steps == 2


def test_followers_cannot_fill_the_buffer_nor_crowd_out_each_other_or_what_was_made_here() -> None:
    buffer = make_buffer(max_age_steps=1)  # 4 groups are what draws can take in one group's life
    for task_id in range(4):
        buffer.add(local(task_id))
    buffer.add(by_follower(10, "honest"))
    for task_id in range(20, 40):
        buffer.add(by_follower(task_id, "flood"))
    assert buffer.num_local == 4 + 1 + 2
    assert buffer.num_dropped == {"surplus": 20 - 2}
    assert by_follower(10, "honest").digest in buffer.digests


def test_one_follower_is_not_the_main_source_against_others_but_alone_it_is() -> None:
    buffer = make_buffer(max_age_steps=3)  # 8 groups
    for task_id in range(6):
        buffer.add(by_follower(task_id, "fast"))
    buffer.add(by_follower(10, "slow"))
    assert (buffer.num_waiting("fast"), buffer.num_waiting("slow"), buffer.num_waiting("nobody")) == (6, 1, 0)
    buffer.add(by_follower(11, "fast"))
    assert buffer.num_waiting("fast") == 6, "no more of it, and what was there stays"
    buffer.add(by_follower(12, "slow"))
    assert buffer.num_local == 8


def test_the_bound_of_one_follower_never_keeps_a_draw_from_being_made() -> None:
    buffer = make_buffer(max_age_steps=0, local_groups=4)
    buffer.add(by_follower(10, "gone"))
    for task_id in range(3):
        buffer.add(by_follower(task_id, "lives"))
    assert buffer.draw(1, at(0), nobody, {}) is not None


def test_external_groups_make_room_before_followers_and_followers_before_what_was_made_here() -> None:
    buffer = make_buffer(max_groups=3)
    own, theirs = local(1), by_follower(2)
    for group in (own, theirs, external(3), local(4)):
        buffer.add(group)
    assert buffer.digests == {own.digest, theirs.digest, local(4).digest}
    buffer.add(local(5))
    assert buffer.digests == {own.digest, local(4).digest, local(5).digest}


def test_after_a_restart_followers_groups_are_local_again() -> None:
    buffer = make_buffer()
    used, zero_variance, fresh = by_follower(1), by_follower(2, rewards=ZERO_VARIANCE), by_follower(3)
    buffer.restore({used.digest: 1, zero_variance.digest: 1}, [used, zero_variance, fresh])
    assert buffer.digests == {fresh.digest} and buffer.num_local == 1


def test_groups_of_the_own_policy_do_not_grow_old_in_a_pause_and_those_of_others_do() -> None:
    clock = ManualClock()
    config = ReplayConfig(local_groups=2, external_groups=2, max_age_s=60.0)
    buffer = ReplayBuffer(config, OWN, 0, clock)
    waiting = [replace(local(i), first_seen_s=clock.now_s()) for i in range(2)]
    foreign = replace(external(5), first_seen_s=clock.now_s())
    for scored in (*waiting, foreign):
        assert buffer.add(scored)
    clock.advance(50.0)
    since_s = clock.now_s()
    late = replace(local(3), first_seen_s=since_s + 5)  # of the batch that was under way
    clock.advance(5000.0)
    assert buffer.add(late)
    buffer.outlast_pause(since_s)
    clock.advance(5.0)
    draw = buffer.draw(1, at(0), nobody, {})
    assert draw is not None
    assert [drawn.scored.digest for drawn in draw.groups] == [scored.digest for scored in waiting]
    assert buffer.num_dropped == {"too_old": 1} and buffer.num_groups == 1, "the foreign one; the late one waits"
    clock.advance(50.0)
    assert buffer.capacity(0, 0) == buffer.capacity(0, 1) + 1
    assert buffer.draw(2, at(0), nobody, {}) is None and buffer.num_groups == 1
    clock.advance(10.0)
    assert buffer.draw(2, at(0), nobody, {}) is None and buffer.num_groups == 0, "after it they do as ever"
