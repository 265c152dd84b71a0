"""Tables that parties share: who holds most makes room for those who ask for little."""

import random

import pytest

from swarm.fairness import FairTable

PLACES = 12


class FirstComeTable(FairTable[str, int]):
    """The defence taken out: whoever came first keeps its places."""

    def longest(self, *, beside: str) -> str | None:
        return None


def fill(table: FairTable[str, int], arrivals: list[str]) -> int:
    """Adds an entry for each arrival, displacing as the table says; returns how many were refused."""
    num_refused = 0
    for number, party in enumerate(arrivals):
        if len(table) >= PLACES:
            most = table.longest(beside=party)
            if most is None:
                num_refused += 1
                continue
            assert table.remove(most, table.newest(most))
        table.add(party, number)
        assert len(table) == sum(len(table.of(each)) for each in table.parties) <= PLACES
    return num_refused


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "first come"])
def test_who_filled_a_table_makes_room_for_those_who_ask_for_little(is_defended: bool) -> None:
    table = FairTable[str, int]() if is_defended else FirstComeTable()
    num_refused = fill(table, ["flood"] * 100 + ["a", "b", "c"])
    assert [len(table.of(party)) for party in ("flood", "a", "b", "c")] == (
        [9, 1, 1, 1] if is_defended else [12, 0, 0, 0]
    )
    assert num_refused == (88 if is_defended else 91)


def test_a_newcomer_displaces_nobody_who_would_have_fewer_than_it() -> None:
    table = FairTable[str, int]()
    fill(table, [party for party in "abcdef" for _ in range(2)])
    assert table.longest(beside="a") is None and table.longest(beside="new") == "a"
    assert fill(table, ["new", "new", "new"]) == 2, "a second one would leave some party with fewer"
    shares = [len(table.of(party)) for party in table.parties]
    assert max(shares) - min(shares) <= 1


def test_shares_of_a_full_table_end_within_one_of_each_other_whoever_comes_first() -> None:
    rng = random.Random(5)
    for _ in range(50):
        table, parties = FairTable[str, int](), "abcde"[: rng.randrange(2, 6)]
        arrivals = [party for party in parties for _ in range(3 * PLACES)]
        rng.shuffle(arrivals)
        fill(table, arrivals)
        shares = [len(table.of(party)) for party in parties]
        assert sum(shares) == PLACES and max(shares) - min(shares) <= 1, shares


def test_parties_take_turns_and_each_ones_entries_keep_their_order() -> None:
    table = FairTable[str, int]()
    for party, entry in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5)]:
        table.add(party, entry)
    assert (table.oldest("a"), table.newest("a"), list(table.of("a"))) == (1, 3, [1, 2, 3])
    assert table.oldest_of_longest() == 1
    assert not table.remove("b", 1) and not table.remove("nobody", 1) and len(table) == 5
    taken: list[int] = []
    while table:
        taken.append(table.pop_oldest(next(iter(table.parties))))
    assert taken == [1, 4, 5, 2, 3] and not table.parties
