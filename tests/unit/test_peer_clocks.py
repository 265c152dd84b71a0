"""A wrong clock is named by a majority of parties, and by nobody alone."""

import pytest

from swarm.clock import ManualClock
from swarm.config import EntryConfig
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.peers.peer_clocks import PeerClocks
from swarm.testing.builders import make_identity

KEYS = [make_identity(number).node_id for number in range(1, 300)]
TRUE_S = 1_000_000.0


class SetClock(ManualClock):
    """A wall clock that somebody sets."""

    def set_by(self, seconds: float) -> None:
        self._start_s += seconds


class Node:
    """A node whose clock is off by `skew_s`, in a run of these members, or a private one."""

    def __init__(self, skew_s: float, members: int | None = None, subnets: int = 10**6) -> None:
        self.clock = SetClock(TRUE_S + skew_s)
        entry = None if members is None else EntryConfig(members=tuple(KEYS[:members]))
        rule = None if entry is None else EntryRule(entry, "demo", self.clock)
        self.parties = Parties(rule, lambda key: f"8.{KEYS.index(key) % subnets}.0.1:4001")
        self.clocks = PeerClocks(self.clock, self.parties)

    def note(self, first: int, count: int, off_s: float = 0.0) -> None:
        for key in KEYS[first : first + count]:
            self.clocks.note(key, TRUE_S + off_s, self.clock.monotonic_s())

    def note_coordinator(self, off_s: float = 0.0) -> None:
        self.clocks.note_coordinator(TRUE_S + off_s, self.clock.monotonic_s())


@pytest.mark.parametrize(("skew_s", "words"), [(250.0, "250 s ahead"), (-3600.0, "3600 s behind")])
def test_a_wrong_clock_is_named_with_offset_bound_and_fix(skew_s: float, words: str) -> None:
    node = Node(skew_s)
    node.note(0, 3)
    finding = node.clocks.finding()
    assert words in finding and "3 of the 3" in finding and "120 s" in finding and "NTP" in finding


@pytest.mark.parametrize("skew_s", [0.0, 100.0, -100.0])
def test_what_peers_accept_is_not_worth_a_word(skew_s: float) -> None:
    node = Node(skew_s)
    node.note(0, 5)
    node.note_coordinator()
    assert node.clocks.finding() == ""


def test_one_coordinator_is_enough_and_a_clock_that_was_set_is_right_at_once() -> None:
    node = Node(-600.0)
    node.note_coordinator()
    assert "600 s behind" in node.clocks.finding()
    node.clock.set_by(600.0)
    assert node.clocks.finding() == ""


@pytest.mark.parametrize("skew_s", [0.0, 250.0], ids=["right", "wrong"])
def test_a_minority_of_liars_neither_scares_nor_calms(skew_s: float) -> None:
    node = Node(skew_s)
    node.note(0, 4)
    node.note(4, 3, off_s=7000.0 if skew_s == 0 else skew_s)
    assert ("250 s ahead" in node.clocks.finding()) is (skew_s > 0)


def test_liars_to_both_sides_are_no_majority() -> None:
    node = Node(0.0)
    node.note(0, 2)
    node.note(2, 2, off_s=7000.0)
    node.note(4, 2, off_s=-7000.0)
    assert node.clocks.finding() == ""


def test_many_keys_of_one_subnet_are_one_vote() -> None:
    node = Node(0.0, members=0, subnets=100)
    for first in range(0, 200, 100):  # keys 7 and 107 share a subnet
        node.note(first + 7, 1, off_s=7000.0)
    node.note(1, 2)
    assert node.clocks.finding() == ""
    node.note(207, 1, off_s=7000.0)
    assert node.clocks.finding() == ""


def test_strangers_of_many_subnets_do_not_outvote_members() -> None:
    node = Node(0.0, members=3)
    node.note(0, 3)
    node.note(3, 260, off_s=7000.0)
    assert node.clocks.finding() == ""


def test_peers_that_all_lie_need_the_coordinator_too() -> None:
    node = Node(0.0, members=0)
    node.note(0, 100, off_s=7000.0)
    assert "7000 s behind" in node.clocks.finding(), "nobody else is there to ask"
    node.note_coordinator()
    assert node.clocks.finding() == ""


def test_what_was_noted_long_ago_and_what_is_no_time_does_not_count() -> None:
    node = Node(250.0)
    for now_s in (0.0, float("nan"), float("inf"), -5.0):
        node.clocks.note(KEYS[0], now_s, node.clock.monotonic_s())
    assert node.clocks.finding() == ""
    node.note(0, 3)
    assert node.clocks.finding()
    node.clock.advance(3700.0)
    assert node.clocks.finding() == ""


def test_a_log_names_a_wrong_clock_once_until_it_was_right_again() -> None:
    node = Node(-600.0)
    node.note(0, 3)
    assert [bool(node.clocks.new_finding()) for _ in range(3)] == [True, False, False]
    for set_by in (600.0, -600.0):
        node.clock.set_by(set_by)
        assert bool(node.clocks.new_finding()) is (set_by < 0)
    assert node.clocks.new_finding() == "" and node.clocks.finding()
