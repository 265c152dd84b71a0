"""The version ledger: one owner, no silent fork, and a history that keeps what a rewind replaces."""

import pytest

from coordinator.ledger import Ledger, LedgerAnswer, LedgerEntry
from swarm.types import PolicyVersion

ADA, BOB = "a" * 64, "b" * 64


def v(step: int, byte: int = 1, owner: str = ADA) -> PolicyVersion:
    return PolicyVersion(policy_id=owner, step=step, digest=bytes([byte]) * 32)


def record(ledger: Ledger, owner: str, version: PolicyVersion, now_s: float) -> LedgerAnswer:
    judgement = ledger.judge(owner, [version], now_s)
    ledger.apply(owner, judgement)
    return judgement.answers[0]


def recorded(ledger: Ledger, *versions: PolicyVersion) -> list[LedgerAnswer]:
    return [record(ledger, version.policy_id, version, now_s=100.0) for version in versions]


def test_steps_that_increase_are_accepted_gaps_included() -> None:
    ledger = Ledger()
    assert all(answer.accepted for answer in recorded(ledger, v(0), v(1), v(5), v(9)))
    assert ledger.head(ADA) == v(9)
    assert ledger.lineages[ADA].versions.after(0, 2) == [v(1), v(5)]


def test_only_the_owner_records_in_a_lineage() -> None:
    ledger = Ledger()
    answer = record(ledger, BOB, v(0, owner=ADA), 1.0)
    assert not answer.accepted and "does not belong" in answer.reason
    assert ledger.head(ADA) is None and ledger.lineages == {}


def test_a_version_without_digest_or_below_zero_is_refused() -> None:
    ledger = Ledger()
    nameless = PolicyVersion(policy_id=ADA, step=0)
    assert "digest of 0 bytes" in record(ledger, ADA, nameless, 1.0).reason
    assert "negative" in record(ledger, ADA, v(-1), 1.0).reason


def test_a_retry_is_accepted_and_adds_nothing() -> None:
    ledger = Ledger()
    recorded(ledger, v(0), v(1))
    answer = record(ledger, ADA, v(1), 2.0)
    assert answer.accepted and answer.entry is None


def test_another_digest_for_a_recorded_step_is_a_fork() -> None:
    ledger = Ledger()
    recorded(ledger, v(0), v(1), v(2))
    for step in (0, 1, 2):
        answer = record(ledger, ADA, v(step, 7), 2.0)
        assert not answer.accepted and answer.reason.startswith("fork")
    assert ledger.head(ADA) == v(2)


def test_a_step_between_recorded_ones_is_going_back() -> None:
    ledger = Ledger()
    recorded(ledger, v(0), v(5))
    answer = record(ledger, ADA, v(3), 2.0)
    assert not answer.accepted and answer.reason.startswith("going back")


def test_a_node_resumes_from_a_recorded_version_and_makes_the_steps_again() -> None:
    ledger = Ledger()
    recorded(ledger, v(0), v(1), v(2), v(3))
    rewind, again, fork = recorded(ledger, v(1), v(2, 7), v(1, 9))
    assert rewind.accepted and rewind.entry is not None and rewind.entry.is_rewind and rewind.entry.parent == 3
    assert again.accepted and again.entry == LedgerEntry(version=v(2, 7), branch=1, parent=1, at_s=100.0)
    assert not fork.accepted and fork.reason.startswith("fork")
    assert ledger.lineages[ADA].versions.after(-1, 10) == [v(0), v(1), v(2, 7)]
    assert ledger.lineages[ADA].num_rewinds == 1


def test_steps_made_again_with_the_same_result_stay_in_their_branch() -> None:
    ledger = Ledger()
    recorded(ledger, v(0), v(1), v(2), v(3))
    answers = recorded(ledger, v(1), v(2), v(3), v(4))
    assert [answer.accepted for answer in answers] == [True] * 4
    assert ledger.lineages[ADA].branch == 0 and ledger.head(ADA) == v(4)


def test_after_a_rewind_a_step_that_was_skipped_before_replaces_all_later_ones() -> None:
    ledger = Ledger()
    recorded(ledger, v(0), v(2), v(4), v(0), v(3, 7))
    assert ledger.lineages[ADA].versions.after(-1, 10) == [v(0), v(3, 7)]


def test_a_rewound_lineage_that_is_restored_can_go_on_where_it_was() -> None:
    ledger = Ledger()
    answers = recorded(ledger, v(0), v(1), v(2), v(1), v(2, 7), v(3, 7), v(2, 7))
    again = Ledger()
    again.restore([answer.entry for answer in answers if answer.entry is not None])
    assert again.lineages == ledger.lineages
    assert record(again, ADA, v(3, 8), 1.0).accepted


def test_what_is_remembered_is_bounded_and_older_steps_are_no_place_to_rewind_to() -> None:
    ledger = Ledger(max_versions=3)
    recorded(ledger, *(v(step) for step in range(10)))
    assert [version.step for version in ledger.lineages[ADA].versions.after(-1, 99)] == [7, 8, 9]
    assert record(ledger, ADA, v(2), 1.0).reason.startswith("going back")


def test_the_number_of_lineages_is_bounded() -> None:
    ledger = Ledger(max_lineages=1)
    assert record(ledger, ADA, v(0), 1.0).accepted
    assert "no room" in record(ledger, BOB, v(0, owner=BOB), 1.0).reason


@pytest.mark.parametrize("version", [v(4), v(9), v(1), v(1, 7), v(3, 8), v(2), v(0, owner=BOB)])
def test_judging_changes_nothing_so_a_version_that_could_not_be_stored_leaves_no_trace(version: PolicyVersion) -> None:
    ledger, same = Ledger(max_versions=4), Ledger(max_versions=4)
    for each in (ledger, same):
        recorded(each, v(0), v(1), v(2), v(3), v(1))  # went back to step 1
    ledger.judge(version.policy_id, [version], 1.0)
    assert ledger == same and BOB not in ledger.lineages
    for later in (v(2, 5), v(3, 6), v(4), v(5), v(6)):
        assert record(ledger, ADA, later, 2.0) == record(same, ADA, later, 2.0)
