"""Messages under way on a stream of the in-memory network: order, room, and the end."""

import asyncio

from swarm.errors import Unavailable
from swarm.interfaces import StreamItem
from swarm.simulate.virtual.direct_network import WINDOW, UnderWay
from swarm.simulate.virtual.loop import run_virtual
from swarm.types import Cursor


def item(number: int) -> StreamItem:
    return StreamItem(cursor=Cursor(sequence=number), digest=bytes(32), size_bytes=1, sealed=None)


async def read_all(under_way: UnderWay[StreamItem]) -> list[tuple[float, int]]:
    """(time, number) of every arrival up to the end."""
    arrivals: list[tuple[float, int]] = []
    while isinstance(arrived := await under_way.read(), StreamItem):
        arrivals.append((round(asyncio.get_running_loop().time(), 3), arrived.cursor.sequence))
    return arrivals


def test_items_arrive_in_order_and_in_time_and_the_end_comes_behind_them() -> None:
    async def main() -> list[tuple[float, int]]:
        under_way = UnderWay[StreamItem]()
        for number, at_s in enumerate((0.0, 1.0, 1.0, 2.5)):
            under_way.send(item(number), at_s)
        under_way.end(EOFError())
        return await read_all(under_way)

    assert run_virtual(main()) == [(0.0, 0), (1.0, 1), (1.0, 2), (2.5, 3)]


def test_a_late_item_comes_behind_later_ones() -> None:
    async def main() -> list[tuple[float, int]]:
        under_way = UnderWay[StreamItem]()
        under_way.send_late(item(0), 2.0)
        under_way.send(item(1), 1.0)
        under_way.send(item(2), 3.0)
        under_way.end(EOFError())
        return await read_all(under_way)

    assert run_virtual(main()) == [(1.0, 1), (2.0, 0), (3.0, 2)]


def test_a_break_is_told_at_once_whatever_is_under_way() -> None:
    async def main() -> float:
        under_way = UnderWay[StreamItem]()
        under_way.send(item(0), 5.0)
        asyncio.get_running_loop().call_later(1.0, under_way.break_off, Unavailable("cut"))
        assert isinstance(await under_way.read(), Unavailable)
        under_way.stop()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1.0


def test_a_sender_waits_while_the_window_is_full() -> None:
    async def main() -> None:
        under_way = UnderWay[StreamItem]()
        for number in range(WINDOW):
            await under_way.room()
            under_way.send(item(number), 0.0)
        waiting = asyncio.create_task(under_way.room())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await under_way.read()
        await waiting

    run_virtual(main())
