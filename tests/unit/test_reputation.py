"""Reputation and quota of peers: what costs, what does not, and that both recover."""

from pathlib import Path

import pytest

from swarm.clock import ManualClock
from swarm.peers.reputation import FLOOR, MAX_REMEMBERED, REPUTATION, Reputation, save_reputation
from swarm.types import RefusalReason

INNOCENT = (
    RefusalReason.TOO_OLD,
    RefusalReason.DUPLICATE,
    RefusalReason.NO_ROOM,
    RefusalReason.OVER_QUOTA,
    RefusalReason.NO_CREDIT,
    RefusalReason.LOW_REPUTATION,
    RefusalReason.FROM_THE_FUTURE,
    RefusalReason.UNKNOWN_ENVIRONMENT,
    RefusalReason.WRONG_RUN,
)


def make_reputation(groups_per_minute: int = 60, max_peers: int = 100) -> tuple[Reputation, ManualClock]:
    clock = ManualClock()
    return Reputation(clock, groups_per_minute, half_life_s=100.0, max_peers=max_peers), clock


def test_three_false_rewards_make_a_producer_low_until_it_decays() -> None:
    reputation, clock = make_reputation()
    assert reputation.score("liar") == 0.0 and reputation.is_allowed("liar") and len(reputation) == 0, "unknown"
    for _ in range(2):
        reputation.record_refused(RefusalReason.FALSE_REWARD, "liar", "liar")
    assert reputation.is_allowed("liar")
    reputation.record_refused(RefusalReason.FALSE_REWARD, "liar", "liar")
    assert not reputation.is_allowed("liar")
    clock.advance(100.0)
    assert reputation.is_allowed("liar") and reputation.score("liar") == -6.0


def test_innocent_refusals_cost_nothing() -> None:
    reputation, _ = make_reputation()
    for reason in INNOCENT:
        for _ in range(100):
            reputation.record_refused(reason, "relay", "producer")
    assert reputation.score("relay") == 0.0 and reputation.score("producer") == 0.0


def test_a_bad_signature_is_charged_to_the_sender_and_never_to_the_name_on_it() -> None:
    reputation, _ = make_reputation()
    for reason in (RefusalReason.WRONG_SIGNATURE, RefusalReason.WRONG_DIGEST, RefusalReason.FORGED_PRODUCER):
        reputation.record_refused(reason, "sender", "victim")
    assert not reputation.is_allowed("sender") and reputation.score("victim") == 0.0


@pytest.mark.parametrize(
    ("reason", "of_relay", "of_liar"),
    [
        (RefusalReason.MALFORMED, -1.0, -4.0),
        (RefusalReason.VERIFIER_FAILED, 0.0, -2.0),
        # a relay of another tokenizer cannot read the tokens
        *((reason, 0.0, -4.0) for reason in (RefusalReason.TEXT_MISMATCH, RefusalReason.BAD_TOKENS)),
        (RefusalReason.WRONG_PROMPT, 0.0, -4.0),
    ],
)
def test_a_relay_pays_a_share_of_provable_lies_and_none_of_what_honest_nodes_may_disagree_on(
    reason: RefusalReason, of_relay: float, of_liar: float
) -> None:
    reputation, _ = make_reputation()
    reputation.record_refused(reason, "relay", "liar")
    assert (reputation.score("relay"), reputation.score("liar")) == (of_relay, of_liar)


def test_credit_and_blame_are_bounded_so_that_recovery_is_too() -> None:
    reputation, clock = make_reputation()
    for _ in range(10_000):
        reputation.record_good("worker")
        reputation.record_refused(RefusalReason.MALFORMED, "flooder", None)
    assert 3.9 < reputation.score("worker") <= 4.0 and reputation.score("flooder") == 2 * FLOOR
    clock.advance(101.0)
    assert reputation.is_allowed("flooder")


def test_a_quota_is_used_up_and_refills_with_time() -> None:
    reputation, clock = make_reputation(groups_per_minute=60)
    assert [reputation.try_take("peer") for _ in range(61)] == [True] * 60 + [False]
    assert reputation.try_take("other")
    clock.advance(2.0)
    assert [reputation.try_take("peer") for _ in range(3)] == [True, True, False]


def test_the_table_is_bounded_and_fresh_identities_do_not_wash_a_guilty_one_clean() -> None:
    reputation, _ = make_reputation(max_peers=100)
    for _ in range(3):
        reputation.record_refused(RefusalReason.FALSE_REWARD, "liar", "liar")
    for number in range(5000):
        reputation.try_take(f"sybil {number}")
    assert len(reputation) == 100 and not reputation.is_allowed("liar")


def test_a_restart_forgives_nothing_that_time_did_not(tmp_path: Path) -> None:
    reputation, clock = make_reputation()
    liar, honest = "1" * 64, "2" * 64
    for _ in range(5):
        reputation.record_refused(RefusalReason.FALSE_REWARD, liar, liar)
    reputation.record_good(honest)
    save_reputation(tmp_path / REPUTATION, reputation.to_remember())
    for down_s, is_allowed in ((10.0, False), (200.0, True)):
        later = ManualClock(clock.now_s() + down_s)
        again = Reputation(later, 60, half_life_s=100.0)
        again.restore(tmp_path / REPUTATION)
        assert again.is_allowed(liar) is is_allowed and again.is_allowed(honest)
        assert again.score(liar) == pytest.approx(-20.0 * 0.5 ** (down_s / 100.0), abs=0.01)
    back = Reputation(ManualClock(clock.now_s() - 1e6), 60, half_life_s=100.0)
    back.restore(tmp_path / REPUTATION)
    assert not back.is_allowed(liar), "a clock that was set back"


def test_only_the_worst_are_remembered_and_only_so_many() -> None:
    reputation, _ = make_reputation(max_peers=3000)
    for number in range(2000):
        for _ in range(1 + (number < 10)):
            reputation.record_refused(RefusalReason.FALSE_REWARD, f"{number:064x}", f"{number:064x}")
    remembered = reputation.to_remember()
    assert len(remembered) == MAX_REMEMBERED and {f"{number:064x}" for number in range(10)} <= remembered.keys()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"peers": 3}',
        '{"peers": {"x": [1, 2]}}',
        '{"peers": {"' + "1" * 64 + '": [NaN, 1]}}',
        '{"peers": {"' + "1" * 64 + '": [-1e999, Infinity]}}',
        '{"peers": {"' + "1" * 64 + '": "ab"}}',
        '{"peers": {"' + "1" * 64 + '": [-5, 1, 2]}}',
        '{"peers": {"' + "1" * 64 + '": [5, 1]}}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_rubbish_in_the_file_is_left_out(text: str, tmp_path: Path) -> None:
    (tmp_path / REPUTATION).write_text(text, encoding="latin-1")
    reputation, _ = make_reputation()
    reputation.restore(tmp_path / REPUTATION)
    assert len(reputation) == 0 and reputation.is_allowed("1" * 64)
