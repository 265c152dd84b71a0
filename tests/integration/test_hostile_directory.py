"""Directories that relays keep and show: what one relay gives, or is given, costs nobody else a place in them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm.clock import ManualClock, SystemClock
from swarm.config import DirectoryConfig, ExchangeConfig
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.loops.relayed_directory import LOOKUP_EVERY_S, RelayedDirectory
from swarm.peers.dht_records import MAX_RECORDS_PER_SHARD, Entry
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.relay.relaying_transport import RelayingTransport
from swarm.testing.builders import HoldsNothing, make_advert, make_identity
from swarm.trust_policy import NEWCOMER_CHECKS_PER_S
from swarm.types import NodeId
from swarm.wire.adverts import author_of, open_advert, seal_advert
from swarm.wire.v1 import relay_service_pb2 as pb
from tests.worlds.relay_world import ADDRESSES, RUN, Caller, relaying

NODE, HOSTILE, HONEST = (make_identity(number) for number in (1, 2, 3))
NUM_HONEST = 20
NEWCOMERS = int(NEWCOMER_CHECKS_PER_S)


def sealed(clock: ManualClock, how_many: int, ttl_s: float = 90.0) -> list[bytes]:
    """Adverts of fresh keys."""
    keys = [Identity.create() for _ in range(how_many)]
    until_s = clock.now_s() + ttl_s
    return [seal_advert(make_advert(key.node_id, run_id=RUN, expires_at_s=until_s), key) for key in keys]


class Shown:
    """A relay's directory, which shows what it likes."""

    def __init__(self, adverts: list[bytes]) -> None:
        self.adverts = adverts

    async def pass_on(self, data: bytes) -> bool:
        return True

    async def records(self) -> list[bytes]:
        return self.adverts


class Flood(Shown):
    """Shows as many fresh adverts as a node takes, others each time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__([])
        self._clock = clock

    async def records(self) -> list[bytes]:
        return sealed(self._clock, 400, ttl_s=290.0)  # valid for longer than those of honest nodes


class Replica:
    """A DHT peer, and the only other one, which tells of these."""

    num_known = 1

    def __init__(self, clock: ManualClock, adverts: list[bytes]) -> None:
        self._clock, self.adverts = clock, adverts
        self.stored: list[bytes] = []

    async def nearest(self, shard: int) -> list[str]:
        return ["replica"]

    async def ask(self, replica: str, shard: int) -> list[Entry]:
        found = [(author_of(data), data) for data in self.adverts]
        return [(author[0], data, author[1]) for author, data in found if author is not None]

    async def store(self, replicas: list[str], shard: int, public_key: bytes, data: bytes, until_s: float) -> int:
        self.stored.append(data)
        return 1

    def held(self, shard: int) -> list[Entry]:
        return []

    async def stop(self) -> None:
        """There is nothing."""


def directory_with(clock: ManualClock, replica: Any) -> HivemindDirectory:
    directory = HivemindDirectory(NODE, RUN, DirectoryConfig(), clock, None)
    directory._peer = replica
    return directory


def authors(clock: ManualClock, adverts: list[bytes]) -> set[NodeId]:
    opened = (open_advert(data, clock.now_s()) for data in adverts)
    return {advert.node_id for advert in opened if advert is not None}


@asynccontextmanager
async def serving(*shown: tuple[Identity, Shown]) -> AsyncGenerator[tuple[RelayingTransport, list[PeerAddress]]]:
    """A node, and relays that show something."""
    transports = [
        RelayingTransport(each, RUN, ExchangeConfig(), SystemClock()) for each in (NODE, *(who for who, _ in shown))
    ]
    try:
        for transport, (_, directory) in zip(transports[1:], shown, strict=True):
            await transport.serve(HoldsNothing())
            transport.directory = directory
        addresses = [PeerAddress(node_id=t._identity.node_id, endpoint=t.endpoint) for t in transports[1:]]
        yield transports[0], addresses
    finally:
        for transport in transports:
            await transport.stop()


async def test_a_relay_that_floods_look_ups_hides_nobody_of_whom_another_relay_tells() -> None:
    """The first to be asked fills the table for good; those of the other relay had what was left."""
    clock = ManualClock()
    honest = Shown(sealed(clock, NUM_HONEST))
    async with serving((HOSTILE, Flood(clock)), (HONEST, honest)) as (node, relays):
        dht = directory_with(clock, Replica(clock, []))
        directory = RelayedDirectory(dht, node, lambda: relays, NODE, clock)
        found: set[NodeId] = set()
        for _ in range(10):
            found = {advert.node_id for advert in await directory.lookup()}
            clock.advance(LOOKUP_EVERY_S)
        assert found >= authors(clock, honest.adverts)
        assert len(found) <= 2 * MAX_RECORDS_PER_SHARD + NUM_HONEST
        await directory.stop()


@pytest.mark.parametrize("hostile", ["relay", "DHT"])
async def test_neither_a_relay_nor_the_dht_uses_up_the_checks_of_the_other(hostile: str) -> None:
    clock = ManualClock()
    honest, flood = sealed(clock, NUM_HONEST), sealed(clock, 2 * NEWCOMERS, ttl_s=290.0)
    replica = Replica(clock, honest if hostile == "relay" else flood)
    dht = directory_with(clock, replica)
    if hostile == "relay":
        for data in flood:
            dht.take(data, HOSTILE.node_id)
        await dht.lookup()
    else:
        await dht.lookup()
        for data in honest:
            dht.take(data, HONEST.node_id)
    found = {advert.node_id for advert in dht.seen()}
    assert len(found & authors(clock, honest)) == NUM_HONEST


async def test_more_keys_than_a_node_remembers_hide_nobody_whom_it_found_before() -> None:
    """200 fresh keys a second, as many as are checked, for 22 s: nobody else was known, or shown, while they came."""
    clock = ManualClock()
    keys = [Identity.create() for _ in range(NUM_HONEST)]

    def announced() -> list[bytes]:
        until_s = clock.now_s() + 90.0
        return [seal_advert(make_advert(key.node_id, run_id=RUN, expires_at_s=until_s), key) for key in keys]

    replica = Replica(clock, announced())
    dht = directory_with(clock, replica)
    assert len(await dht.lookup()) == NUM_HONEST
    for _ in range(22):
        clock.advance(1.0)
        for data in sealed(clock, NEWCOMERS, ttl_s=290.0):
            author = author_of(data)
            assert author is not None and dht._checker.open(0, author[0], data, author[1]) is not None
    everyone = {key.node_id for key in keys}
    assert {advert.node_id for advert in dht.seen()} >= everyone
    replica.adverts = announced()
    fresh = {advert.node_id for advert in await dht.lookup() if advert.expires_at_s == clock.now_s() + 90.0}
    assert fresh >= everyone


async def test_who_holds_a_reservation_is_found_at_its_relay_though_the_directory_is_full() -> None:
    """Two subnets announce 256 free keys within 16 s, and thousands until the first of these expire."""
    clock = ManualClock()
    replica: Any = Replica(clock, [])
    async with relaying() as relay:
        directory = relay.transport.directory = directory_with(clock, replica)
        for _ in range(5):
            for data in sealed(clock, 200, ttl_s=290.0):
                assert await directory.pass_on(data)
            clock.advance(1.0)
        assert len(await directory.records()) == 2 * MAX_RECORDS_PER_SHARD
        told: list[bytes] = []
        for source in ADDRESSES[:6]:
            holder = await relay.caller(source)
            assert await holder.reserve() is not None
            told.append(await announce(holder, clock))
        assert set(replica.stored) >= set(told), "other peers of the DHT may have room"
        found = await looked_up(await relay.caller(ADDRESSES[6]))
        assert set(found) >= set(told)
        assert len(found) <= 2 * MAX_RECORDS_PER_SHARD + len(told)


async def announce(caller: Caller, clock: ManualClock) -> bytes:
    until_s = clock.now_s() + 90.0
    data = seal_advert(make_advert(caller.identity.node_id, run_id=RUN, expires_at_s=until_s), caller.identity)
    await caller.stub.Announce(pb.AnnounceRequest(advert=data), metadata=caller.metadata, timeout=10.0)
    return data


async def looked_up(caller: Caller) -> list[bytes]:
    call = caller.stub.Lookup(pb.LookupRequest(), metadata=caller.metadata, timeout=10.0)
    return [data async for response in call for data in response.adverts]
