"""The ledger under any sequence of records, against what its history alone must imply."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.ledger import Ledger, LedgerAnswer, LedgerEntry
from swarm.types import PolicyVersion

ADA = "a" * 64
CALLS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=40)


def version(step: int, byte: int) -> PolicyVersion:
    return PolicyVersion(policy_id=ADA, step=step, digest=bytes([byte]) * 32)


def record(ledger: Ledger, step: int, byte: int, at_s: float = 1.0) -> LedgerAnswer:
    judgement = ledger.judge(ADA, [version(step, byte)], at_s)
    ledger.apply(ADA, judgement)
    return judgement.answers[0]


def play(ledger: Ledger, calls: list[tuple[int, int]]) -> list[LedgerEntry]:
    entries = [record(ledger, *call, at_s=float(number)).entry for number, call in enumerate(calls)]
    return [entry for entry in entries if entry is not None]


@given(CALLS)
def test_no_step_has_two_digests_within_a_branch_and_a_branch_only_grows(calls: list[tuple[int, int]]) -> None:
    history = [entry for entry in play(Ledger(), calls) if not entry.is_rewind]
    for branch in {entry.branch for entry in history}:
        steps = [entry.version.step for entry in history if entry.branch == branch]
        assert steps == sorted(set(steps))
    assert [entry.branch for entry in history] == sorted(entry.branch for entry in history)


@given(CALLS)
def test_a_new_branch_begins_only_after_a_recorded_rewind(calls: list[tuple[int, int]]) -> None:
    history = play(Ledger(), calls)
    for before, entry in itertools.pairwise(history):
        if entry.branch > before.branch:
            rewinds = [e for e in history[: history.index(entry)] if e.is_rewind and e.branch == before.branch]
            assert rewinds and min(e.version.step for e in rewinds) <= entry.parent < entry.version.step


@given(CALLS)
def test_the_history_alone_rebuilds_the_present_branch(calls: list[tuple[int, int]]) -> None:
    ledger, again = Ledger(), Ledger()
    again.restore(play(ledger, calls))
    branches = [
        {owner: lineage.versions.after(-1) for owner, lineage in each.lineages.items()} for each in (again, ledger)
    ]
    assert branches[0] == branches[1]
    assert again.head(ADA) == ledger.head(ADA)


@given(CALLS, CALLS)
@example([(0, 1), (1, 1), (0, 1), (1, 1)], [(2, 1), (1, 1)])  # step 1 was made again after a rewind, with its result
def test_what_was_accepted_is_accepted_again_by_a_restored_ledger(
    calls: list[tuple[int, int]], later: list[tuple[int, int]]
) -> None:
    ledger, again = Ledger(), Ledger()
    again.restore(play(ledger, calls))
    for step, byte in later:
        if record(ledger, step, byte).accepted:
            assert record(again, step, byte).accepted
        else:
            break


@given(CALLS, CALLS)
def test_versions_recorded_together_are_judged_as_if_one_by_one(
    before: list[tuple[int, int]], together: list[tuple[int, int]]
) -> None:
    ledger, one_by_one = Ledger(max_versions=4), Ledger(max_versions=4)
    play(ledger, before)
    play(one_by_one, before)
    judgement = ledger.judge(ADA, [version(*call) for call in together], 1.0)
    ledger.apply(ADA, judgement)
    assert judgement.answers == [record(one_by_one, *call) for call in together]
    assert ledger == one_by_one
