"""What a look-up keeps when most replicas of a shard are hostile and answer with fresh keys without end."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any

import pytest

from swarm.clock import ManualClock
from swarm.config import DirectoryConfig
from swarm.identity import Identity
from swarm.peers.dht_records import MAX_RECORDS_PER_SHARD, Entry, in_turn
from swarm.peers.discovery_dht import HivemindDirectory
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


@pytest.mark.timeout(60)
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
