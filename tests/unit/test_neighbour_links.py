"""Links to neighbours: dead addresses beside live ones, who is dropped and who stays, when the directory is asked."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from swarm.config import EntryConfig, ExchangeConfig
from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress, StreamItem
from swarm.testing.builders import make_advert, make_identity
from swarm.types import (
    Advert,
    Cursor,
    StreamFilter,
)

from .neighbour_bench import FIRST, OURS, SECOND, Bench, Honest, Neighbour, play, scene


def test_who_answers_is_streamed_from_while_dead_addresses_are_still_tried() -> None:
    async def scene(bench: Bench) -> None:
        connect, num_dead = bench.connect, 0

        async def slowly(address: PeerAddress, timeout_s: float) -> Neighbour:
            nonlocal num_dead
            if address.node_id not in bench.neighbours:
                num_dead += 1
                await asyncio.sleep(timeout_s)  # nobody refuses there
                raise Unavailable("nobody there")
            return await connect(address, timeout_s)

        bench.connect = slowly  # type: ignore[method-assign]
        bench.adverts += [make_advert(make_identity(50 + number).node_id) for number in range(6)]
        bench.add(Honest(FIRST.node_id, []))
        bench.add(Honest(SECOND.node_id, []))
        await asyncio.sleep(1.0)
        assert num_dead > 0 and not bench.agent.address_book.num_failed
        assert bench.agent.peers.connected == {FIRST.node_id, SECOND.node_id}
        await asyncio.sleep(60.0)
        assert bench.agent.peers.connected == {FIRST.node_id, SECOND.node_id} and bench.agent.address_book.num_failed

    play(scene)


@scene()
async def test_a_neighbour_is_asked_for_notices_of_others_before_its_old_stream_ends(bench: Bench) -> None:
    """More adverts than places, be they hostile, change what is asked of everybody: nobody is alone meanwhile."""
    asked: list[bool] = []  # whether with notices

    class Slow(Neighbour):
        async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
            asked.append(wanted.relay)
            async for item in super().subscribe(cursor, wanted):
                yield item

    connect = bench.connect

    async def slowly(address: PeerAddress, timeout_s: float) -> Neighbour:
        await asyncio.sleep(1.0)
        if address.node_id not in bench.neighbours:
            raise Unavailable("nobody there")
        return await connect(address, timeout_s)

    bench.connect = slowly  # type: ignore[method-assign]
    bench.add(Slow(FIRST.node_id, []))
    await asyncio.sleep(6.0)
    bench.adverts += [make_advert(make_identity(50 + number).node_id) for number in range(20)]
    for _ in range(200):
        await asyncio.sleep(0.1)
        assert bench.agent.peers.connected == {FIRST.node_id}
    assert asked == [False, True]
    assert bench.agent.peers._num_streams == {FIRST.node_id: 1}, "the old one has ended"


@scene()
async def test_a_neighbour_that_the_run_denies_is_dropped_though_it_works(bench: Bench) -> None:
    bench.add(Honest(FIRST.node_id, []))
    await asyncio.sleep(5.0)
    assert bench.agent.peers.connected == {FIRST.node_id}
    bench.adverts.clear()
    await asyncio.sleep(5.0)
    assert bench.agent.peers.connected == {FIRST.node_id}, "the directory does not decide"
    bench.agent.entry_rule.update(EntryConfig(denied=(FIRST.node_id,)))
    await asyncio.sleep(5.0)
    assert not bench.agent.peers.connected


@scene(exchange=ExchangeConfig(max_neighbours=1))
async def test_a_peer_that_answers_and_serves_nothing_loses_its_place_to_one_that_does(bench: Bench) -> None:
    class Refusing(Neighbour):
        async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
            self.num_said += 1
            raise Unavailable("all streams are taken")
            yield

    refusing = Refusing(min(FIRST.node_id, SECOND.node_id), [])
    other = Honest(max(FIRST.node_id, SECOND.node_id), [])
    bench.add(refusing)
    bench.add(other)
    linked = 0
    for _ in range(300):
        await asyncio.sleep(1.0)
        linked += other.node_id in bench.agent.peers.connected
    assert linked > 150 and refusing.num_said < 40, (linked, refusing.num_said)


@scene(exchange=ExchangeConfig(lookup_every_s=180.0))
async def test_a_node_whom_nobody_reaches_looks_again_soon_and_then_ever_later(bench: Bench) -> None:
    """The directory may name a relay by then; a look-up every 180 s would leave it alone for so long."""
    looks: list[float] = []

    async def lookup() -> list[Advert]:
        looks.append(bench.clock.monotonic_s())
        return bench.adverts

    bench.lookup = lookup  # type: ignore[method-assign]
    bench.agent.endpoints = ("127.0.0.1:1",)
    bench.adverts = [make_advert(OURS.node_id), make_advert(FIRST.node_id)]
    await asyncio.sleep(100.0)
    assert len(looks) == 1
    bench.agent.endpoints = ()  # its relay went
    bench.agent.context.changed.fire()
    await asyncio.sleep(1.0)
    assert len(looks) == 2
    await asyncio.sleep(70.0)
    assert 5 <= len(looks) <= 8, looks
    await asyncio.sleep(3600.0)
    assert len(looks) <= 8 + 3600 / (0.8 * 180), looks
    bench.agent.endpoints = ("127.0.0.1:1",)
    await asyncio.sleep(400.0)
    del looks[:]
    bench.adverts = bench.adverts[:1]  # nobody but itself
    await asyncio.sleep(400.0)
    assert len(looks) >= 6, looks
    bench.adverts = [*bench.adverts, replace(make_advert(FIRST.node_id), relay_reservations=1)]
    bench.agent.endpoints = ()
    await asyncio.sleep(400.0)
    del looks[:]
    await asyncio.sleep(400.0)
    assert len(looks) <= 3, "it knows a relay: a large directory is not read again for another"


@scene()
async def test_what_a_peer_shows_for_entry_is_remembered_as_soon_as_it_answers(bench: Bench) -> None:
    bench.neighbours[FIRST.node_id] = Honest(FIRST.node_id, [])
    bench.adverts.append(make_advert(FIRST.node_id, credential=b"invitation"))
    await asyncio.sleep(1.0)  # before the next look-up: the process may end until then
    assert [each["credential"] for each in bench.agent.address_book.to_remember()] == [b"invitation".hex()]
