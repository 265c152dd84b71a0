"""Turns by subnet: how many others go before one that comes late, and what happens when all places are taken."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from coordinator.turns import SubnetTurns
from swarm.errors import Unavailable


@asynccontextmanager
async def in_order_of_arrival(self: SubnetTurns, subnet: str) -> AsyncGenerator[None]:
    """The defence taken out: one at a time, whoever came first."""
    lock: asyncio.Lock = self.__dict__.setdefault("lock", asyncio.Lock())
    async with lock:
        yield


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


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "in order of arrival"])
async def test_who_sends_one_call_waits_for_one_of_each_other_subnet(
    monkeypatch: pytest.MonkeyPatch, is_defended: bool
) -> None:
    if not is_defended:
        monkeypatch.setattr(SubnetTurns, "of", in_order_of_arrival)
    flood = [f"127.1.0.{number % 5}" for number in range(500)]
    served = await served_in_order(SubnetTurns(), [*flood, "127.0.0.1"])
    assert (served.index("127.0.0.1") <= 6) is is_defended


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
    assert entered == ["d", "e"] and not turns._waiting


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
        turns._make_room("e")  # of those that were cancelled, while they still count
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3 + [type(None)] * 2
    assert entered == ["d", "e"] and not turns._waiting and not turns._is_taken


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
    assert not turns._is_taken
    async with turns.of("d"):
        pass
