"""Storage and validation of adverts inside hivemind, and parsers of the answers that it receives.

Invariant: only checked adverts of our run are kept, one table per shard, and answers are bounded before they are
parsed.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import msgpack as _untyped_msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2 as _untyped_dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.clock import Clock
from swarm.peers.dht_records import MAX_RECORDS_PER_SHARD, MAX_REPLY_BYTES, RecordChecker, ShardRecords, shard_key

dht_pb2, msgpack = cast(Any, _untyped_dht_pb2), cast(Any, _untyped_msgpack)

_MAX_PEER_ID_BYTES = 64  # those of Ed25519 have 38
_SUBKEY_HEAD = b"\xc4\x20"  # msgpack: 32 bytes of binary


class AdvertStorage(DHTLocalStorage):
    """hivemind's local storage, bounded: one table per shard of the run, and no other key."""

    def __init__(self, run_id: str, shards: int, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.keys = [DHTID.generate(source=shard_key(run_id, shard)) for shard in range(shards)]
        self.shard_by_key = {key.to_bytes(): shard for shard, key in enumerate(self.keys)}
        self._shards = {key: ShardRecords() for key in self.keys}

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Keeps a record that has a sub-key; returns False for any other."""
        return False if subkey is None else self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Keeps a record that the validator has passed; False if the key is not a shard's, or as `ShardRecords.put`."""
        records = self._shards.get(key)
        return records is not None and records.put(subkey, value, expiration_time, self._clock.now_s())

    def records(self, key: DHTID) -> list[tuple[bytes, bytes, float]]:
        """Sub-key, value and expiry of each unexpired record under a shard's key."""
        return [(author, r.data, r.expires_at_s) for author, r in self._shards[key].items(self._clock.now_s())]

    def get(self, key: Any) -> Any:
        """The records of a key in the form in which hivemind sends them; None if there are none."""
        records = self.records(key) if key in self._shards else []
        if not records:
            return None
        dictionary = DictionaryDHTValue()
        for author, data, expires_at_s in records:
            dictionary.store(author, data, expires_at_s)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> Iterator[Any]:
        """No items: hivemind would send all of them to any peer that states a new id near a key, again and again."""
        return iter(())

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return sum(key in self for key in self.keys)

    def __bool__(self) -> bool:
        return len(self) > 0


class AdvertsOnly(RecordValidatorBase):
    """Validator that passes only adverts of our run, both into storage and out of answers."""

    def __init__(self, shard_by_key: dict[bytes, int], checker: RecordChecker) -> None:
        self._shard_by_key, self._checker = shard_by_key, checker

    def validate(self, record: DHTRecord) -> bool:
        """True if a record holds an advert of our run, so that it may be stored or believed."""
        shard = self._shard_by_key.get(record.key)
        if shard is None or not record.subkey.startswith(_SUBKEY_HEAD):
            return False
        public_key = record.subkey[len(_SUBKEY_HEAD) :]
        return self._checker.open(shard, public_key, record.value, record.expiration_time) is not None


def records_in(response: Any) -> list[tuple[bytes, bytes, float]]:
    """The unchecked records in an answer to a read: (sub-key, value, expiry); [] if there are none or it is too large.

    May raise any exception on hostile bytes. hivemind's nested table is read one level at a time: its own parser
    recurses as deep as the bytes are nested, and a kilobyte of nesting ends the process.
    """
    (result,) = response.results
    if result.type != dht_pb2.FOUND_DICTIONARY or len(result.value) > MAX_REPLY_BYTES:
        return []
    *_, entries = _unpack(_unpack(result.value).data)
    return [
        (author, data, until_s)
        for author, data, until_s in entries
        if isinstance(author, bytes) and isinstance(data, bytes) and isinstance(until_s, float)
    ]


def _unpack(data: bytes) -> Any:
    """The value in bounded msgpack without maps: a list, nested or not, is allocated by the length that it states."""
    return msgpack.unpackb(data, max_array_len=2 * MAX_RECORDS_PER_SHARD, max_map_len=0)


def peers_in(response: Any, most: int) -> list[tuple[int, PeerID]]:
    """The first `most` node ids and peers that an answer names; [] if one is too long. May raise any exception."""
    (result,) = response.results
    named = [*islice(zip(result.nearest_node_ids, result.nearest_peer_ids, strict=True), most)]
    if any(len(node_id) > DHTID.HASH_NBYTES or len(peer) > _MAX_PEER_ID_BYTES for node_id, peer in named):
        return []  # a peer id is written in base 58 at once, which takes time by the square of its length
    return [(int.from_bytes(node_id), PeerID(peer)) for node_id, peer in named]
