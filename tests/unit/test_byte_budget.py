"""Shares of a relay's bytes: more connections of a caller, and more keys of a subnet, give it no more of them."""

import asyncio
from collections import Counter

import pytest

from swarm.relay.byte_budget import ByteBudget
from swarm.relay.tunnel import FRAME_BYTES
from swarm.simulate.virtual.loop import LoopClock, run_virtual

BYTES_PER_S = 2**20
SECONDS = 20.0
WRITE_S = 0.002  # from one frame of a connection to its next one


def passed(connections: dict[tuple[str, str], int], size: int = FRAME_BYTES) -> Counter[str]:
    """Bytes of each caller, (caller, subnet) -> connections that send all they can."""

    async def scene() -> Counter[str]:
        budget = ByteBudget(LoopClock(asyncio.get_running_loop()), BYTES_PER_S, BYTES_PER_S / 16)
        done = Counter[str]()

        async def send(caller: str, subnet: str) -> None:
            while True:
                await budget.take(size, caller, subnet)
                done[caller] += size
                await asyncio.sleep(WRITE_S)

        tasks = [asyncio.create_task(send(*who)) for who, count in connections.items() for _ in range(count)]
        await asyncio.sleep(SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    return run_virtual(scene())


def test_a_caller_with_many_connections_has_the_share_of_one_with_one() -> None:
    done = passed({("many", "1.0.0.0/24"): 31, ("one", "2.0.0.0/24"): 1})
    assert sum(done.values()) == pytest.approx(SECONDS * BYTES_PER_S, rel=0.05)
    assert done["one"] / sum(done.values()) > 0.45


def test_many_keys_of_one_subnet_have_the_share_of_a_few() -> None:
    keys = {(f"key {number}", "1.0.0.0/24"): 1 for number in range(100)}
    done = passed({**keys, ("one", "2.0.0.0/24"): 1})
    assert done["one"] / sum(done.values()) > 0.9 / (ByteBudget.CALLERS_PER_SUBNET + 1)


def test_who_is_alone_has_all_of_it_and_frames_of_one_byte_are_few() -> None:
    done = passed({("one", "1.0.0.0/24"): 31})
    assert done["one"] == pytest.approx(SECONDS * BYTES_PER_S, rel=0.05)
    frames = passed({("one", "1.0.0.0/24"): 31}, size=1)
    assert frames["one"] <= 1.1 * SECONDS * BYTES_PER_S / ByteBudget.LEAST_BYTES


def test_frames_of_connections_that_ended_cost_nothing() -> None:
    async def scene() -> None:
        budget = ByteBudget(LoopClock(asyncio.get_running_loop()), BYTES_PER_S, FRAME_BYTES)
        gone = [asyncio.create_task(budget.take(FRAME_BYTES, "gone", "1.0.0.0/24")) for _ in range(1000)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        async with asyncio.timeout(1.0):
            await budget.take(FRAME_BYTES, "one", "2.0.0.0/24")

    run_virtual(scene())
