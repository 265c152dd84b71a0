"""Room for streams of peers: keys are free, addresses are not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from swarm.errors import Unavailable
from swarm.exchange import exchange_servicer
from swarm.exchange.exchange_servicer import STREAMS_PER_PEER, ExchangeServicer

NUM_STREAMS = 8


@dataclass(frozen=True)
class PeerContext:
    """A call's context with its peer's address alone."""

    address: str

    def peer(self) -> str:
        return f"ipv4:{self.address}:4001"


async def hold(servicer: ExchangeServicer, peer: str, address: str, opened: asyncio.Queue[str]) -> str:
    """Holds one stream; returns why it ended."""
    try:
        async with servicer._one_stream(peer, cast(Any, PeerContext(address))):  # pyright: ignore[reportPrivateUsage] - the servicer's methods differ in nothing else
            opened.put_nowait(peer)
            await asyncio.Event().wait()
    except Unavailable as error:
        opened.put_nowait("")
        return str(error)
    raise AssertionError("the event is never set")


async def end(calls: Sequence[asyncio.Task[str]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def standing(peer: str) -> int:
    """As the name of the peer says."""
    return {"known": 1, "vouched": 2}.get(peer.partition(" ")[0], 0)


async def test_keys_of_as_many_subnets_as_places_make_room_for_known_peers_and_keep_their_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_servicer, "STREAMS_TOTAL", NUM_STREAMS)
    monkeypatch.setattr(exchange_servicer, "STREAMS_OF_NEWCOMERS", 2)
    calls: list[tuple[str, str]] = []
    servicer = ExchangeServicer(
        cast(Any, None), cast(Any, None), 1.0, standing, lambda peer, subnet: calls.append((peer, subnet))
    )
    opened = asyncio.Queue[str]()
    held: list[asyncio.Task[str]] = []

    async def offer(peer: str) -> bool:
        """True if a peer of a subnet of its own gets a stream."""
        task = asyncio.create_task(hold(servicer, peer, f"{len(held) + 1}.0.0.1", opened))
        held.append(task)
        while (name := await opened.get()) != peer:
            if task.done():
                return False
            assert name == "", "another one made room"
        return True

    assert [await offer(f"key {number}") for number in range(NUM_STREAMS)] == [True] * NUM_STREAMS
    assert calls[:2] == [("key 0", "1.0.0.0/24"), ("key 1", "2.0.0.0/24")]
    assert not await offer("another key")
    assert [await offer(f"known {number}") for number in range(6)] == [True] * 6
    streams = servicer._streams.items()  # pyright: ignore[reportPrivateUsage]
    assert sum(len(own) for peer, own in streams if not standing(peer)) == 2, "strangers keep their part"
    assert not await offer("known one more") and not await offer("one key more")
    assert await offer("vouched")
    await end(held)


async def test_many_keys_of_one_subnet_hold_no_stream_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_servicer, "STREAMS_TOTAL", NUM_STREAMS)
    servicer = ExchangeServicer(cast(Any, None), cast(Any, None), stall_timeout_s=1.0)
    opened = asyncio.Queue[str]()
    hostile = [
        asyncio.create_task(hold(servicer, f"key {number}", f"1.2.3.{number}", opened)) for number in range(NUM_STREAMS)
    ]
    assert [await opened.get() for _ in hostile] == [f"key {number}" for number in range(NUM_STREAMS)]
    assert "streams are open" in await hold(servicer, "one more key", "1.2.3.99", opened)
    assert await opened.get() == ""
    honest = asyncio.create_task(hold(servicer, "honest", "5.6.7.8", opened))
    first = await opened.get()
    assert not honest.done()
    assert {first, await opened.get()} == {"honest", ""}
    assert sum(task.done() for task in hostile) == 1
    await end([*hostile, honest])


async def test_the_oldest_stream_of_a_peer_makes_room_for_one_over_its_next_connection() -> None:
    servicer, opened = ExchangeServicer(cast(Any, None), cast(Any, None), 60.0), asyncio.Queue[str]()
    calls: list[asyncio.Task[str]] = []
    for _ in range(STREAMS_PER_PEER + 3):  # the connection of those before may have broken without a word
        calls.append(asyncio.create_task(hold(servicer, "peer", "9.0.0.1", opened)))
        while (await opened.get()) == "":
            continue
    for call in calls[:3]:
        assert "newer one of its own" in await call
    assert not any(call.done() for call in calls[3:])
    assert sum(map(len, servicer._streams.values())) == STREAMS_PER_PEER  # pyright: ignore[reportPrivateUsage]
    await end(calls)
    assert not servicer._streams and not servicer._subnets  # pyright: ignore[reportPrivateUsage]
