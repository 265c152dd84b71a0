"""Waiters of a signal wake exactly when it fires, and tables of peers stay within their bound."""

import asyncio

from swarm.flow import Signal
from swarm.peers.peer_table import keep_newest


async def test_a_waiter_wakes_when_its_condition_holds_and_not_before() -> None:
    signal, values = Signal(), list[int]()
    waiting = asyncio.create_task(signal.until(lambda: len(values) == 2))
    for value in (1, 2):
        await asyncio.sleep(0)
        assert not waiting.done()
        values.append(value)
        signal.fire()
    await asyncio.wait_for(waiting, 1.0)


async def test_a_fire_without_waiters_is_not_kept_and_a_cancelled_waiter_leaves_nothing() -> None:
    signal = Signal()
    signal.fire()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    signal.fire()
    assert not signal._waiters


def test_a_table_of_peers_forgets_whoever_was_heard_of_longest_ago() -> None:
    table: dict[str, int] = {}
    for number in range(5):
        keep_newest(table, f"peer {number}", number, limit=3)
        keep_newest(table, "peer 0", number, limit=3)
    assert table == {"peer 3": 3, "peer 4": 4, "peer 0": 4}
