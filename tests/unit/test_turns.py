"""Turns by subnet: how many others go before one that comes late, and what happens when all places are taken."""

import asyncio
from itertools import pairwise

import pytest

from coordinator.turns import CallerTurns, SubnetTurns
from swarm.clock import ManualClock
from swarm.config import EntryConfig
from swarm.errors import Unavailable
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties


async def served_in_order(turns: SubnetTurns, arrivals: list[str]) -> list[str]:
    """The subnets that were let through, in their order; "-" before those that were turned away."""
    served: list[str] = []

    async def come(subnet: str) -> None:
        try:
            async with turns.of(subnet):
                served.append(subnet)
                await asyncio.sleep(0)
        except Unavailable:
            served.append(f"-{subnet}")

    async with asyncio.TaskGroup() as group:
        for subnet in arrivals:
            group.create_task(come(subnet))
    return served


def is_idle(turns: SubnetTurns) -> bool:
    """Nobody waits, and the place is free."""
    fair = turns._turns
    return not any(fair._waiting.values()) and not any(fair._num_held.values())


async def test_who_sends_one_call_waits_for_one_of_each_other_subnet() -> None:
    flood = [f"127.1.0.{number % 5}" for number in range(500)]
    served = await served_in_order(SubnetTurns(), [*flood, "127.0.0.1"])
    assert served.index("127.0.0.1") <= 6


async def test_a_subnet_has_its_bound_and_a_full_queue_makes_room_for_others() -> None:
    served = await served_in_order(SubnetTurns(per_subnet=3), ["a"] * 6 + ["b"])
    assert served == ["a", "-a", "-a", "a", "b", "a", "a"]
    served = await served_in_order(SubnetTurns(per_subnet=3, total=3), ["a"] * 4 + ["b", "b"])
    assert sorted(served) == ["-a", "-b", "a", "a", "a", "b"]


async def test_a_turn_that_is_cancelled_passes_on() -> None:
    turns = SubnetTurns()
    entered: list[str] = []

    async def enter(subnet: str) -> None:
        async with turns.of(subnet):
            entered.append(subnet)

    async with turns.of("a"):
        waiting = [asyncio.ensure_future(enter(subnet)) for subnet in "bcd"]
        await asyncio.sleep(0)
        waiting[1].cancel()
    waiting[0].cancel()  # its turn has come, and it did not take it
    assert [type(result) for result in await asyncio.gather(*waiting, return_exceptions=True)] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
        type(None),
    ]
    assert entered == ["d"]
    async with turns.of("e"):
        entered.append("e")
    assert entered == ["d", "e"] and is_idle(turns)


async def test_waiters_that_are_cancelled_as_a_turn_ends_are_passed_over() -> None:
    turns = SubnetTurns(total=4)
    entered: list[str] = []

    async def enter(subnet: str) -> None:
        async with turns.of(subnet):
            entered.append(subnet)

    async with turns.of("a"):
        waiting = [asyncio.ensure_future(enter(subnet)) for subnet in "bbcd"]
        await asyncio.sleep(0)
        for waiter in waiting[:3]:
            waiter.cancel()
        waiting.append(asyncio.ensure_future(enter("e")))
        turns._turns._require_room("e", turns._turns._waiting[True])  # cancelled ones still count
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3 + [type(None)] * 2
    assert entered == ["d", "e"] and is_idle(turns)


async def test_turns_go_on_when_all_who_wait_were_cancelled() -> None:
    turns = SubnetTurns()

    async def enter(subnet: str) -> None:
        async with turns.of(subnet):
            raise AssertionError(subnet)

    async with turns.of("a"):
        waiting = [asyncio.ensure_future(enter(subnet)) for subnet in "bc"]
        await asyncio.sleep(0)
        for waiter in waiting:
            waiter.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert is_idle(turns)
    async with turns.of("d"):
        pass


ADA, BOB, EVE = (letter * 64 for letter in "abe")


def listing(*members: str) -> Parties:
    return Parties(EntryRule(EntryConfig(members=members), "run", ManualClock()))


async def order_of(turns: CallerTurns, node_ids: list[str]) -> list[str]:
    """Nodes in the order of their turns; each calls from a subnet of its own, all at once."""
    served: list[str] = []

    async def come(number: int, node_id: str) -> None:
        async with turns.of_node(node_id, f"ipv4:127.0.{number}.1:4000"):
            served.append(node_id)

    async with asyncio.TaskGroup() as group:
        for number, node_id in enumerate(node_ids):
            group.create_task(come(number, node_id))
    return served


async def test_a_listed_node_waits_for_no_stranger() -> None:
    served = await order_of(CallerTurns(listing(ADA)), [EVE] * 50 + [ADA])
    assert served.index(ADA) <= 1 and len(served) == 51


async def test_a_listed_node_that_floods_waits_for_itself() -> None:
    served = await order_of(CallerTurns(listing(ADA, BOB)), [BOB] * 50 + [ADA])
    assert served.index(ADA) <= 2


async def test_strangers_have_turns_of_their_own_while_listed_nodes_flood() -> None:
    served = await order_of(CallerTurns(listing(ADA)), [ADA] * 50 + [EVE])
    assert served.index(EVE) <= 2


async def test_a_subnet_is_known_once_an_established_node_called_from_it() -> None:
    turns = CallerTurns(listing(ADA))
    turns.know("127.0.5.1")
    async with turns.of_node(ADA, "ipv4:127.0.0.1:4000"), turns.of_node(EVE, "ipv4:127.0.1.1:4000"):
        pass  # one is known, and the other is not
    kinds = [turns._known if turns.is_known(f"ipv4:127.0.{number}.1:9") else turns._strange for number in (5, 0, 1)]
    assert kinds == [turns._known, turns._known, turns._strange]


async def test_where_everybody_is_established_a_key_says_nothing_and_subnets_take_turns() -> None:
    turns, served = CallerTurns(), list[str]()

    async def come(node_id: str, host: str) -> None:
        async with turns.of_node(node_id, f"ipv4:{host}:4000"):
            served.append(host)

    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(come(f"{number:064x}", "127.0.0.2"))
        group.create_task(come(ADA, "127.0.0.1"))
    assert served.index("127.0.0.1") <= 2
    assert not turns.is_known("ipv4:127.0.0.1:4000"), "who joins does not wait for the reports of nodes"


@pytest.mark.parametrize("rounds", [0, 8])
async def test_calls_come_in_between_two_turns(rounds: int) -> None:
    turns = SubnetTurns(rounds=rounds)
    num_rounds, at = 0, list[int]()

    async def count() -> None:
        nonlocal num_rounds
        while len(at) < 3:
            await asyncio.sleep(0)
            num_rounds += 1

    async def come() -> None:
        async with turns.of("a"):
            at.append(num_rounds)

    await asyncio.gather(count(), *(come() for _ in range(3)))
    assert all((after - before >= 8) is (rounds == 8) for before, after in pairwise(at)), at


async def test_a_stranger_rests_after_its_turn_and_others_do_not_wait_for_it() -> None:
    turns = CallerTurns(listing(ADA))
    turns._strange = SubnetTurns(rest_s=3600.0)
    async with turns.of_node(EVE, "ipv4:127.0.0.1:4000"):
        pass
    waiting = asyncio.ensure_future(order_of(turns, [EVE]))
    assert await order_of(turns, [ADA, ADA]) == [ADA, ADA] and not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
