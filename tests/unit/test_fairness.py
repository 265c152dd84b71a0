"""Tables and turns that parties share: who holds most makes room, who asks for little goes soon."""

import asyncio
import random

from swarm.fairness import FairTable, FairTurns

PLACES = 12


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


def test_who_filled_a_table_makes_room_for_those_who_ask_for_little() -> None:
    table = FairTable[str, int]()
    num_refused = fill(table, ["flood"] * 100 + ["a", "b", "c"])
    assert [len(table.of(party)) for party in ("flood", "a", "b", "c")] == [9, 1, 1, 1]
    assert num_refused == 88


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


async def test_unknown_parties_never_hold_the_reserved_place() -> None:
    turns, order = FairTurns[str](num_places=3, num_reserved=1, max_per_party=1), list[str]()
    release = asyncio.Event()

    async def take(party: str, is_known: bool) -> None:
        async with turns.turn(party, is_known=is_known):
            order.append(party)
            if not is_known:
                await release.wait()

    flood = [asyncio.create_task(take(f"new {i}", False)) for i in range(9)]
    await asyncio.sleep(0)
    known = asyncio.create_task(take("known", True))
    await asyncio.sleep(0.01)
    assert known.done() and len(order) == 3
    release.set()
    await asyncio.gather(*flood, known)
    assert len(order) == 10


async def test_a_party_that_asks_for_much_delays_another_by_one_turn() -> None:
    turns, order = FairTurns[str](num_places=1, num_reserved=0, max_per_party=1), list[str]()

    async def take(party: str) -> None:
        async with turns.turn(party, is_known=False):
            order.append(party)
            await asyncio.sleep(0)

    many = [asyncio.create_task(take("greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(take("modest"), take("third"), *many)
    assert max(order.index("modest"), order.index("third")) <= 4 and len(order) == 22


async def test_both_classes_go_on_while_both_wait() -> None:
    turns, order = FairTurns[str](num_places=2, num_reserved=1, max_per_party=2), list[bool]()

    async def take(is_known: bool) -> None:
        async with turns.turn(str(is_known), is_known=is_known):
            order.append(is_known)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(i % 2 == 0) for i in range(40)))
    assert 8 <= sum(order[:20]) <= 12


async def test_turns_that_are_cancelled_leave_nothing() -> None:
    turns, rng = FairTurns[int](num_places=2, num_reserved=1, max_per_party=1), random.Random(3)

    async def take(party: int) -> None:
        async with turns.turn(party, is_known=party % 2 == 0):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    for _ in range(200):
        tasks = [asyncio.create_task(take(rng.randrange(4))) for _ in range(6)]
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not turns._held_by and turns._num_held == {True: 0, False: 0}
    assert not any(map(len, turns._waiting.values()))


async def test_a_turn_that_is_ended_early_is_given_back_once() -> None:
    turns = FairTurns[str](num_places=1, num_reserved=0, max_per_party=1)
    async with turns.turn("first", is_known=True) as turn:
        turn.end()
        async with turns.turn("second", is_known=True):
            turn.end()
            assert turns._num_held == {True: 1, False: 0}
    assert turns._num_held == {True: 0, False: 0}
