"""The upload limit: how many bytes leave in a time, and whose go first where they are short."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from swarm.peers.send_order import BURST_S, UploadLimit
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.trust_policy import SHARE

RATE = 1000
Result = TypeVar("Result")


def under_limit(
    work: Callable[[UploadLimit], Awaitable[Result]], is_giver: Callable[[str], bool] = lambda _: True
) -> Result:
    async def main() -> Result:
        return await work(UploadLimit(RATE, LoopClock(asyncio.get_running_loop()), is_giver))

    return run_virtual(main())


async def send(
    limit: UploadLimit, peer: str, num_bytes: int, sent: list[tuple[float, str]], times: int = 1, subnet: str = ""
) -> None:
    for _ in range(times):
        await limit.take(peer, subnet or peer, num_bytes)
        sent.append((asyncio.get_running_loop().time(), peer))


def test_bytes_that_leave_are_those_of_the_time_and_a_burst() -> None:
    async def work(limit: UploadLimit) -> list[tuple[float, str]]:
        sent: list[tuple[float, str]] = []
        await asyncio.gather(*(send(limit, f"peer {i}", 100, sent, times=20) for i in range(5)))
        return sent

    sent = under_limit(work)
    for number, (at_s, _) in enumerate(sent):
        assert 100 * number <= RATE * (at_s - sent[0][0] + BURST_S) + 100
    assert sent[-1][0] == pytest.approx(100 * 100 / RATE - BURST_S, abs=0.2), "it is used up"


def test_a_message_larger_than_a_burst_leaves_and_is_paid_for() -> None:
    async def work(limit: UploadLimit) -> list[tuple[float, str]]:
        sent: list[tuple[float, str]] = []
        await send(limit, "a", 10 * RATE, sent, times=3)
        return sent

    assert [at_s for at_s, _ in under_limit(work)] == pytest.approx([0.0, 9.0, 19.0])


def test_a_peer_that_asks_for_much_delays_no_other() -> None:
    async def work(limit: UploadLimit) -> list[tuple[float, str]]:
        sent: list[tuple[float, str]] = []
        greedy = [send(limit, "greedy", RATE, sent) for _ in range(50)]
        await asyncio.wait_for(asyncio.gather(*greedy, _later(send(limit, "modest", RATE, sent))), 100)
        return sent

    sent = under_limit(work)
    assert [peer for _, peer in sent].index("modest") <= 4


def test_takers_have_one_byte_of_a_share_while_givers_wait_and_all_when_none_does() -> None:
    async def work(limit: UploadLimit) -> list[tuple[float, str]]:
        await limit.take("giver", "", 2 * RATE)  # the burst is used up
        sent: list[tuple[float, str]] = []
        takers = [send(limit, f"taker {i}", 100, sent, times=40) for i in range(4)]
        givers = [send(limit, f"giver {i}", 100, sent, times=40) for i in range(2)]
        await asyncio.gather(*takers, *givers)
        return sent

    order = [peer.split()[0] for _, peer in under_limit(work, is_giver=lambda peer: peer.startswith("giver"))]
    together = order[: len(order) - order[::-1].index("giver")]
    assert together.count("taker") == pytest.approx(80 / (SHARE - 1), abs=2)
    assert order[len(together) :] == ["taker"] * (160 - together.count("taker"))


def test_a_hundred_keys_of_a_subnet_delay_a_taker_of_another_no_more_than_one() -> None:
    async def work(limit: UploadLimit) -> list[tuple[float, str]]:
        sent: list[tuple[float, str]] = []
        keys = [send(limit, f"key {i}", RATE, sent, subnet="10.0.0.0/24") for i in range(100)]
        await asyncio.gather(*keys, _later(send(limit, "alone", RATE, sent, subnet="192.0.2.0/24")))
        return sent

    sent = under_limit(work, is_giver=lambda _: False)
    assert [peer for _, peer in sent].index("alone") <= 4


def test_a_wait_that_is_cancelled_costs_nobody_anything() -> None:
    async def work(limit: UploadLimit) -> float:
        await limit.take("a", "", 2 * RATE)
        given_up = asyncio.ensure_future(limit.take("b", "", 100 * RATE))
        await asyncio.sleep(0.5)
        given_up.cancel()
        await limit.take("c", "", 1)
        return asyncio.get_running_loop().time()

    assert under_limit(work) == pytest.approx(1.0)


async def _later(work: Awaitable[None]) -> None:
    await asyncio.sleep(1.5)
    await work
