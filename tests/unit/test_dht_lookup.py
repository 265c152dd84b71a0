"""A look-up's records when most replicas of a shard are hostile and answer with fresh keys without end."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any

import pytest

from swarm.clock import ManualClock
from swarm.config import DirectoryConfig
from swarm.identity import Identity
from swarm.peers.dht_records import MAX_RECORDS_PER_SHARD, Entry, in_turn
from swarm.peers.discovery_dht import MAX_CACHED_ADDRESSES, HivemindDirectory
from swarm.testing.builders import TOY_RUN_ID, make_advert
from swarm.types import Advert
from swarm.wire.adverts import seal_advert

NUM_HONEST, NUM_REPLICAS = 10, 8


def one_after_the_other(answers: Sequence[Sequence[Entry]]) -> Iterator[Entry]:
    """Mutation: whoever is asked first fills the tables and uses up the checks."""
    return chain.from_iterable(answers)


class Replicas:
    """A DHT peer of which all replicas but the last are hostile."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._fresh = clock, count()
        self.honest = [self._entry(f"honest {n}", 90.0) for n in range(NUM_HONEST)]

    def _entry(self, name: str, ttl_s: float) -> Entry:
        identity = Identity.from_seed(hashlib.sha256(name.encode()).digest())
        advert = make_advert(identity.node_id, run_id=TOY_RUN_ID, expires_at_s=self._clock.now_s() + ttl_s)
        return identity.public_key, seal_advert(advert, identity), advert.expires_at_s

    def _hostile(self, how_many: int) -> list[Entry]:
        return [self._entry(f"hostile {next(self._fresh)}", 60.0) for _ in range(how_many)]

    async def nearest(self, shard: int) -> list[int]:
        return list(range(NUM_REPLICAS))

    async def ask(self, replica: int, shard: int) -> list[Entry]:
        if replica < NUM_REPLICAS - 1:
            return self._hostile(2 * MAX_RECORDS_PER_SHARD)
        return [*self.honest, *self._hostile(MAX_RECORDS_PER_SHARD - NUM_HONEST)]

    def held(self, shard: int) -> list[Entry]:
        return []


@pytest.mark.parametrize("order", [in_turn, one_after_the_other])
async def test_one_honest_replica_of_eight_is_enough(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.peers.discovery_dht.in_turn", order)
    clock = ManualClock()
    replicas: Any = Replicas(clock)
    directory = HivemindDirectory(Identity.create(), TOY_RUN_ID, DirectoryConfig(), clock, None)
    directory._peer = replicas
    adverts: list[Advert] = []
    for _ in range(4):
        adverts = await directory.lookup()
        clock.advance(2.0)
    honest = {Identity.from_seed(hashlib.sha256(f"honest {n}".encode()).digest()).node_id for n in range(NUM_HONEST)}
    num_found = len(honest & {advert.node_id for advert in adverts})
    assert len(adverts) <= 2 * MAX_RECORDS_PER_SHARD
    assert num_found == (NUM_HONEST if order is in_turn else 0)


def test_the_peers_that_are_connected_keep_their_places_among_the_addresses_for_the_next_start() -> None:
    directory = HivemindDirectory(Identity.create(), TOY_RUN_ID, DirectoryConfig(), ManualClock(), None)
    old = [f"/ip4/127.0.0.1/tcp/{1 + n}/p2p/old{n}" for n in range(100)]
    hostile = [f"/ip4/127.0.0.2/tcp/{1 + n}/p2p/new{n}" for n in range(1000)]
    directory._remember([*old, "/ip4/0.0.0.0/tcp/1/p2p/x", "rubbish"])
    directory._remember([*hostile, *old])
    assert set(old) <= directory._known.keys() and len(directory._known) == MAX_CACHED_ADDRESSES
    others = [f"/ip4/127.0.0.3/tcp/{1 + n}/p2p/other{n}" for n in range(20)]
    directory._remember([*old, *others])
    assert {*old, *others} <= directory._known.keys(), "they replace those that are gone"
