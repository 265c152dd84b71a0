"""Seconds of a minute that groups of one party take: how many, and what is left for who shares them with a flood."""

import random

import pytest

from swarm.environments.sandbox.time_accounts import Allowance, TimeAccounts
from swarm.interfaces import Producer
from swarm.trust_policy import FIRST_TRY_S
from swarm.types import NodeId

MOST_S = 12.0  # of a minute


class Bench:
    """Accounts with a clock that stands."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.accounts = TimeAccounts(lambda: self.now_s, MOST_S)

    def take(self, producer: Producer, seconds: float) -> float:
        """The seconds that a group takes which wants so many; a first try ends."""
        allowance = self.accounts.allowance(producer)
        taken_s = {Allowance.NOTHING: 0.0, Allowance.FIRST_TRY: min(FIRST_TRY_S, seconds), Allowance.ALL: seconds}[
            allowance
        ]
        if taken_s:
            self.accounts.spend(producer, taken_s, allowance)
        return taken_s


def make_producer(name: str, origin: str = "10.0.0.0/24", is_known: bool = False) -> Producer:
    return Producer(node_id=NodeId(name), is_known=is_known, origin=origin)


def test_an_account_has_so_many_seconds_of_a_minute_and_those_of_others_are_their_own() -> None:
    bench = Bench()
    one, friend = make_producer("one"), make_producer("one", is_known=True)
    num_s = 0.0
    for second in range(1200):  # whatever it asks for: a second of work in a second
        bench.now_s = float(second)
        num_s += bench.take(one, 1.0)
    assert 0.75 < num_s / (1200 / 60 * MOST_S) <= 1.0
    while bench.take(one, 1.0):
        pass
    others = [one, make_producer("other"), friend, make_producer("two", "10.1.0.0/24")]
    found = [bench.accounts.allowance(each) for each in others]
    assert found == [Allowance.NOTHING, Allowance.FIRST_TRY, Allowance.ALL, Allowance.ALL]
    bench.now_s += 60.0
    assert bench.accounts.allowance(one) is Allowance.ALL


def test_free_keys_take_no_more_than_the_account_however_many_they_are() -> None:
    """Ten minutes of 6,000 fresh keys a minute, what a neighbour may pass on, each of whom takes all that it may."""
    bench, taken_s = Bench(), 0.0
    for number in range(60_000):
        bench.now_s = number / 100
        taken_s += bench.take(make_producer(f"free {number}"), 0.7)
    assert taken_s / 10 < 1.2 * MOST_S  # it may have a minute of them at once


@pytest.mark.parametrize(("flood", "least"), [(120, 0.99), (6000, 0.01)], ids=["below_the_cap", "all_that_is_relayed"])
def test_a_newcomer_beside_a_flood_of_free_keys_is_tried(flood: int, least: float) -> None:
    """Of groups that come at any moment, each of a key that was not tried: 150 keys a minute find room."""
    bench, rng = Bench(), random.Random(1)
    is_honest = [False] * (10 * flood) + [True] * 600
    rng.shuffle(is_honest)
    num_tried = 0
    for number, each in enumerate(is_honest):
        bench.now_s = 600 * number / len(is_honest)
        taken_s = bench.take(make_producer(f"key {number}"), 0.001 if each else 0.7)
        num_tried += each and taken_s > 0
    assert num_tried / 600 > least


def test_a_key_that_took_its_first_try_waits() -> None:
    bench = Bench()
    while bench.take(make_producer("greedy"), 0.7) > FIRST_TRY_S:
        pass
    one = make_producer("one")
    taken = [bench.take(one, 1.0) for _ in range(5)]
    assert taken == [FIRST_TRY_S, FIRST_TRY_S, 0.0, 0.0, 0.0]
