"""One lineage: what is in force, what a rewind abandons, and what is remembered of either."""

from swarm.types import PolicyVersion
from swarm.version_history import VersionHistory, VersionStatus


def v(step: int, weights: str = "main") -> PolicyVersion:
    return PolicyVersion(policy_id="a" * 64, step=step, digest=f"{weights} {step}".encode().ljust(32, b"."))


def history_to(step: int, **bounds: int) -> VersionHistory:
    history = VersionHistory(**bounds)
    for each in range(step + 1):
        history.record(v(each))
    return history


def test_an_empty_history_knows_nothing() -> None:
    history = VersionHistory()
    assert history.head is None and history.after(-1) == [] and len(history) == 0
    assert history.status(v(0)) is VersionStatus.UNKNOWN_NEWER and history.rewind(-1) == []


def test_a_step_has_one_version_unless_a_better_word_replaces_it() -> None:
    history = history_to(5)
    assert not history.record(v(3, "other"), replaces=False)
    assert history.status(v(3, "other")) is VersionStatus.CONFLICT and history.head == v(5)
    assert history.record(v(3, "other"))
    assert history.head == v(3, "other")
    assert {history.status(v(step)) for step in (3, 4, 5)} == {VersionStatus.ABANDONED}


def test_a_rewind_abandons_what_is_beyond_it_and_steps_made_again_bit_for_bit_are_in_force_again() -> None:
    history = history_to(5)
    assert history.rewind(3) == [v(4), v(5)]
    assert history.head == v(3) and history.record(v(4))
    assert history.status(v(4)) is VersionStatus.CURRENT and history.status(v(5)) is VersionStatus.ABANDONED


def test_versions_come_in_any_order_and_gaps_are_forgotten_not_false() -> None:
    history = VersionHistory()
    for step in (7, 2, 5):
        history.record(v(step))
    assert history.after(-1) == [v(2), v(5), v(7)] and history.after(2, limit=1) == [v(5)]
    assert history.status(v(6)) is VersionStatus.FORGOTTEN and history.status(v(8)) is VersionStatus.UNKNOWN_NEWER
    history.forget(5)
    assert history.at(5) is None and history.status(v(5)) is VersionStatus.FORGOTTEN


def test_both_tables_are_bounded() -> None:
    history = history_to(9, max_versions=4, max_abandoned=2)
    assert history.after(-1) == [v(6), v(7), v(8), v(9)]
    history.rewind(5)
    assert [history.status(v(step)) for step in (7, 8, 9)] == [
        VersionStatus.UNKNOWN_NEWER,
        VersionStatus.ABANDONED,
        VersionStatus.ABANDONED,
    ]
    history.record_abandoned(v(1, "other"))
    assert history.status(v(8)) is VersionStatus.UNKNOWN_NEWER
    assert history.status(v(1, "other")) is VersionStatus.ABANDONED
