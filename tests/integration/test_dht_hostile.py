"""Messages of a hostile DHT peer are refused, bounded, and hide nobody."""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from attacked_dht import RUN, Stage, advert_of, staged

from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.dht_records import MAX_RECORDS_PER_SHARD, shard_key
from swarm.wire.adverts import seal_advert

pytest.importorskip("hivemind")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as it:
        yield it


async def test_a_replica_takes_a_right_record_and_refuses_every_wrong_one(stage: Stage) -> None:
    from hivemind.dht.routing import DHTID

    node = await stage.join()
    victim, attacker, me, other = node.visible_maddrs()[0], await stage.attack(), Identity.create(), Identity.create()
    advert = advert_of(me)
    until_s, good = advert.expires_at_s, seal_advert(advert, me)
    forged = bytearray(good)
    forged[-1] ^= 1
    long_lived = seal_advert(advert_of(me, ttl_s=10_000), me)
    external = seal_advert(advert_of(me, run_id="other-run"), me)
    late = time.time() + 10_000
    wrong: dict[str, tuple[object, bytes, float]] = {
        "forged": (me.public_key, bytes(forged), until_s),
        "someone else's sub-key": (other.public_key, good, until_s),
        "sub-key of 33 bytes": (me.public_key + b"x", good, until_s),
        "sub-key that is no bytes": (me.node_id, good, until_s),
        "NaN expiry": (me.public_key, good, math.nan),
        "infinite expiry": (me.public_key, good, math.inf),
        "expiry other than signed": (me.public_key, good, until_s + 5),
        "past expiry": (me.public_key, good, time.time() - 5),
        "long expiry": (me.public_key, long_lived, late),
        "oversize": (me.public_key, good + bytes(2000), until_s),
        "another run": (me.public_key, external, until_s),
        "128 KiB": (me.public_key, bytes(2**17), until_s),
        "no sub-key": (None, good, until_s),
    }
    for name, (subkey, value, expiry) in wrong.items():
        assert not await attacker.store(victim, subkey, value, expiry), name
    with pytest.raises(AssertionError, match="did not answer"):  # above 256 KiB nothing is read
        await attacker.store(victim, me.public_key, bytes(2**20), until_s)
    stray = DHTID.generate(source="another key")
    assert not await attacker.store(victim, me.public_key, good, until_s, key=stray)
    assert await node.lookup() == []
    assert await attacker.store(victim, me.public_key, good, until_s)
    assert [found.node_id for found in await node.lookup()] == [me.node_id]


async def test_a_peer_at_the_key_that_answers_nothing_hides_nobody(stage: Stage) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration

    for _ in range(4):
        await stage.join()
    attacker = await stage.attack(node_id=DHTID.generate(source=shard_key(RUN, 0)))
    empty = DictionaryDHTValue()
    empty.latest_expiration_time = math.inf
    attacker.node.protocol.storage.get = lambda key: ValueWithExpiration(empty, math.inf)  # type: ignore[method-assign]
    for identity, directory in stage.honest:
        await directory.announce(advert_of(identity))
    everyone = {identity.node_id for identity, _ in stage.honest}
    for _ in range(3):
        for _, directory in stage.honest:
            assert {advert.node_id for advert in await directory.lookup()} == everyone


async def test_answers_full_of_rubbish_are_passed_over(stage: Stage) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration

    for _ in range(2):
        await stage.join()
    attacker = await stage.attack(node_id=DHTID.generate(source=shard_key(RUN, 0)))
    rubbish: list[object] = [b"\xc1", b"\x91" * 5000]
    for entries in ([(["a"], b"x", 1.0)], [(b"k" * 32, 5, math.nan)], [(b"k" * 32, b"v" * 400, time.time() + 50)] * 9):
        dictionary = DictionaryDHTValue()
        dictionary.latest_expiration_time = math.inf
        dictionary.items = lambda entries=entries: iter((k, (v, t)) for k, v, t in entries)  # type: ignore[method-assign]
        rubbish.append(dictionary)
    for identity, directory in stage.honest:
        await directory.announce(advert_of(identity))
    everyone = {identity.node_id for identity, _ in stage.honest}
    for value in rubbish:
        answer = ValueWithExpiration(value, math.inf)
        attacker.node.protocol.storage.get = lambda key, answer=answer: answer  # type: ignore[method-assign]
        for _, directory in stage.honest:
            assert {advert.node_id for advert in await directory.lookup()} == everyone


@pytest.mark.parametrize("named", ["itself", "nobody", "ever nearer ones"])
async def test_a_peer_that_names_others_as_it_likes_hides_nobody(named: str, stage: Stage) -> None:
    """One free key at the shard: all that are asked are its own ids, or peers that are not there, or nobody in time."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    for _ in range(2):
        await stage.join()
    key = DHTID.generate(source=shard_key(RUN, 0))
    attacker = await stage.attack(node_id=DHTID(int(key) ^ 2**20))
    attacker.node.protocol.storage.get = lambda key: None  # type: ignore[method-assign]
    mine, distances = attacker.node.peer_id, itertools.count(2**19, -1)
    ghosts = [PeerID(b"\x12\x20" + bytes([number]) * 32) for number in range(20)]

    def name(*arguments: Any, **options: Any) -> list[tuple[DHTID, Any]]:
        near = [DHTID(int(key) ^ (next(distances) if named == "ever nearer ones" else 2 + n)) for n in range(20)]
        honest = [directory._peer._node.node_id for _, directory in stage.honest]  # type: ignore[union-attr]
        peers = ghosts if named == "nobody" else [mine] * 20
        return [*zip(near, peers, strict=True), *((node_id, mine) for node_id in honest)]

    attacker.node.protocol.routing_table.get_nearest_neighbors = name  # type: ignore[method-assign]
    for _, directory in stage.honest:
        await directory.maintain()
    everyone, num_found = {identity.node_id for identity, _ in stage.honest}, 0
    for identity, directory in stage.honest:
        with contextlib.suppress(Unavailable):
            await directory.announce(advert_of(identity))
    for _, directory in stage.honest:
        with contextlib.suppress(Unavailable):
            num_found += len({advert.node_id for advert in await directory.lookup()} & everyone)
    assert num_found == len(everyone) ** 2


@pytest.mark.parametrize("denies", [False, True], ids=["says it", "says it and denies it"])
async def test_a_peer_that_says_the_ids_of_others_takes_no_place_of_theirs(denies: bool, stage: Stage) -> None:
    """One free key, a message for each other node: in its victim's table it was alone, and it answers nothing."""
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    for _ in range(4):
        await stage.join()
    victim: Any = stage.honest[0][1]
    others = [directory._peer._node for _, directory in stage.honest[1:]]  # type: ignore[union-attr]
    attacker = await stage.attack()
    attacker.node.protocol.storage.get = lambda key: None  # type: ignore[method-assign]
    attacker.node.protocol.routing_table.get_nearest_neighbors = lambda *arguments, **options: []  # type: ignore[method-assign]
    stub = attacker.node.protocol.get_stub(PeerID.from_base58(victim.visible_maddrs()[0].rpartition("/p2p/")[2]))
    for node in others:
        stolen = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())  # type: ignore[attr-defined]
        await stub.rpc_ping(dht_pb2.PingRequest(peer=stolen, validate=denies), timeout=5.0)  # type: ignore[attr-defined]
    await asyncio.sleep(0.2)  # the table changes after the answer
    table = victim._peer._node.protocol.routing_table
    assert all(table.get(node_id=node.node_id) == node.peer_id for node in others)
    identity, directory = stage.honest[-1]
    stores: Any = directory._peer
    others_only = [PeerID.from_base58(d.visible_maddrs()[0].rpartition("/p2p/")[2]) for _, d in stage.honest[1:-1]]
    advert = advert_of(identity)
    assert await stores.store(
        others_only, 0, identity.public_key, seal_advert(advert, identity), advert.expires_at_s
    ) == len(others_only)
    assert {found.node_id for found in await victim.lookup()} == {identity.node_id}


async def test_a_flood_of_valid_identities_is_bounded_and_leaves_known_nodes_in_place(stage: Stage) -> None:
    for _ in range(3):
        await stage.join()
    for identity, directory in stage.honest:
        await directory.announce(advert_of(identity))
    attacker, reader = await stage.attack(), stage.honest[1][1]
    victims = [directory.visible_maddrs()[0] for _, directory in stage.honest]
    sybils = [Identity.create() for _ in range(600)]
    records = [(sybil, advert_of(sybil, ttl_s=60.0)) for sybil in sybils]
    for start in range(0, len(records), 100):
        for victim in victims:
            await asyncio.gather(
                *(
                    attacker.store(victim, sybil.public_key, seal_advert(advert, sybil), advert.expires_at_s)
                    for sybil, advert in records[start : start + 100]
                )
            )
    found = {advert.node_id for advert in await reader.lookup()}
    assert {identity.node_id for identity, _ in stage.honest} <= found
    assert len(found) <= 2 * MAX_RECORDS_PER_SHARD
    identity, directory = stage.honest[2]
    await directory.announce(advert_of(identity, ttl_s=95.0))  # still refreshes under the flood
    fresh = {advert.node_id: advert.expires_at_s for advert in await reader.lookup()}
    assert fresh[identity.node_id] > time.time() + 91
