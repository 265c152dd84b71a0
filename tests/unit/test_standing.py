"""Standing and quota of peers: what costs, what does not, and that both recover."""

from swarm.clock import ManualClock
from swarm.peers.reputation import FLOOR, Standing
from swarm.types import RefusalReason

INNOCENT = (
    RefusalReason.TOO_OLD,
    RefusalReason.DUPLICATE,
    RefusalReason.NO_ROOM,
    RefusalReason.OVER_QUOTA,
    RefusalReason.NO_LEAVE,
    RefusalReason.LOW_STANDING,
    RefusalReason.FROM_THE_FUTURE,
    RefusalReason.UNKNOWN_ENVIRONMENT,
    RefusalReason.WRONG_RUN,
)


def make_standing(groups_per_minute: int = 60, max_peers: int = 100) -> tuple[Standing, ManualClock]:
    clock = ManualClock()
    return Standing(clock, groups_per_minute, half_life_s=100.0, max_peers=max_peers), clock


def test_a_stranger_is_neither_good_nor_bad() -> None:
    standing, _ = make_standing()
    assert standing.score("stranger") == 0.0 and not standing.is_low("stranger") and len(standing) == 0


def test_three_false_rewards_make_a_producer_low_until_it_decays() -> None:
    standing, clock = make_standing()
    for _ in range(2):
        standing.record_refused(RefusalReason.FALSE_REWARD, "liar", "liar")
    assert not standing.is_low("liar")
    standing.record_refused(RefusalReason.FALSE_REWARD, "liar", "liar")
    assert standing.is_low("liar")
    clock.advance(100.0)
    assert not standing.is_low("liar") and standing.score("liar") == -6.0


def test_innocent_refusals_cost_nothing() -> None:
    standing, _ = make_standing()
    for reason in INNOCENT:
        for _ in range(100):
            standing.record_refused(reason, "relay", "producer")
    assert standing.score("relay") == 0.0 and standing.score("producer") == 0.0


def test_a_bad_signature_is_charged_to_the_sender_and_never_to_the_name_on_it() -> None:
    standing, _ = make_standing()
    for reason in (RefusalReason.WRONG_SIGNATURE, RefusalReason.WRONG_DIGEST, RefusalReason.FORGED_PRODUCER):
        standing.record_refused(reason, "sender", "victim")
    assert standing.is_low("sender") and standing.score("victim") == 0.0


def test_a_relay_pays_a_share_of_provable_lies_and_none_of_what_honest_nodes_may_disagree_on() -> None:
    standing, _ = make_standing()
    standing.record_refused(RefusalReason.FALSE_REWARD, "relay", "liar")
    assert standing.score("relay") == -1.0 and standing.score("liar") == -4.0
    standing.record_refused(RefusalReason.VERIFIER_FAILED, "relay", "liar")
    assert standing.score("relay") == -1.0 and standing.score("liar") == -6.0


def test_good_groups_earn_bounded_credit() -> None:
    standing, _ = make_standing()
    for _ in range(10_000):
        standing.record_good("worker")
    assert 3.9 < standing.score("worker") <= 4.0


def test_blame_is_bounded_so_that_the_way_back_is_too() -> None:
    standing, clock = make_standing()
    for _ in range(1000):
        standing.record_refused(RefusalReason.MALFORMED, "flooder", None)
    assert standing.score("flooder") == 2 * FLOOR
    clock.advance(101.0)
    assert not standing.is_low("flooder")


def test_a_quota_is_used_up_and_refills_with_time() -> None:
    standing, clock = make_standing(groups_per_minute=60)
    assert [standing.take("peer") for _ in range(61)] == [True] * 60 + [False]
    assert standing.take("other")
    clock.advance(2.0)
    assert [standing.take("peer") for _ in range(3)] == [True, True, False]


def test_the_table_is_bounded_and_fresh_identities_do_not_wash_a_guilty_one_clean() -> None:
    standing, _ = make_standing(max_peers=100)
    for _ in range(3):
        standing.record_refused(RefusalReason.FALSE_REWARD, "liar", "liar")
    for number in range(5000):
        standing.take(f"sybil {number}")
    assert len(standing) == 100 and standing.is_low("liar")
