"""A node's intake: enough for its draws, no more, and from every neighbour."""

from swarm.clock import ManualClock
from swarm.config import ReplayConfig
from swarm.peers.quotas import MAX_NEIGHBOURS, IntakeQuota

ENOUGH = 1000  # groups held: no draw goes short


def make_intake_quota(clock: ManualClock, every_s: float = 10.0, **replay: object) -> IntakeQuota:
    """One that has measured a draw every `every_s`."""
    intake_quota = IntakeQuota(ReplayConfig(external_groups=4, max_age_steps=4).model_copy(update=replay), clock)
    for _ in range(3):
        clock.advance(every_s)
        intake_quota.record_draw()
    return intake_quota


def offer(
    intake_quota: IntakeQuota, clock: ManualClock, peers: list[str], seconds: int, num_held: int = ENOUGH
) -> list[str]:
    """Producers of the groups that are taken when every peer offers ten per second."""
    taken: list[str] = []
    for tick in range(10 * seconds):
        clock.advance(0.1)
        taken += [peer for peer in peers if intake_quota.try_take(peer, len(peers), num_held)]
        if tick % 100 == 99:
            intake_quota.record_draw()
    return taken


def test_everything_is_taken_until_the_time_between_draws_is_known() -> None:
    clock = ManualClock()
    intake_quota = IntakeQuota(ReplayConfig(), clock)
    assert all(intake_quota.try_take("a", 1, ENOUGH) for _ in range(1000))
    intake_quota.record_draw()
    assert all(intake_quota.try_take("a", 1, ENOUGH) for _ in range(1000))


def test_half_as_much_again_as_the_draws_use_is_taken_whatever_is_offered() -> None:
    clock = ManualClock()
    intake_quota = make_intake_quota(clock)
    offer(intake_quota, clock, ["a", "b"], 100)  # uses up what was saved
    taken = offer(intake_quota, clock, ["a", "b"], 100)
    assert 57 <= len(taken) <= 63  # ten draws of four, one and a half times


def test_what_is_taken_is_spread_over_the_time_between_two_draws() -> None:
    clock = ManualClock()
    intake_quota = make_intake_quota(clock, every_s=100.0)
    offer(intake_quota, clock, ["a"], 10)
    per_second = [len(offer(intake_quota, clock, ["a"], 1)) for _ in range(9)]
    assert max(per_second) <= 1


def test_a_neighbour_that_sends_much_leaves_the_share_of_the_others() -> None:
    clock = ManualClock()
    intake_quota = make_intake_quota(clock)
    for _ in range(1000):
        intake_quota.try_take("greedy", 4, ENOUGH)
    assert not intake_quota.try_take("greedy", 4, ENOUGH)
    assert intake_quota.try_take("modest", 4, ENOUGH)


def test_a_node_that_holds_less_than_a_draw_takes_refuses_nobody() -> None:
    clock = ManualClock()
    intake_quota = make_intake_quota(clock)
    assert all(intake_quota.try_take("a", 1, num_held=3) for _ in range(1000))
    assert not intake_quota.try_take("a", 1, num_held=4)


def test_a_barrier_takes_everything_and_a_node_that_uses_nothing_of_others_takes_nothing() -> None:
    clock = ManualClock()
    assert all(make_intake_quota(clock, barrier=True).try_take("a", 1, ENOUGH) for _ in range(1000))
    silo = make_intake_quota(clock, external_groups=0)
    silo.try_take("a", 1, 0)
    assert not offer(silo, clock, ["a"], 100, num_held=0)


def test_neighbours_are_forgotten_beyond_a_bound() -> None:
    clock = ManualClock()
    intake_quota = make_intake_quota(clock)
    for number in range(3 * MAX_NEIGHBOURS):
        intake_quota.try_take(str(number), 1, ENOUGH)
    assert len(intake_quota._buckets) == MAX_NEIGHBOURS
