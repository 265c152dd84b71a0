"""Records of the directory: signed adverts, checked at a bounded rate and kept in bounded tables.

Invariant: a record is a signed advert of our run, under its author's key, with the expiry that its author signed; work
is bounded by rates, memory by tables that a flood of new identities cannot empty.
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from swarm.clock import Clock
from swarm.flow import BoundedTable, TokenBucket
from swarm.identity import node_id_of
from swarm.peers.entry import EntryRule
from swarm.trust_policy import KNOWN_CHECKS_PER_S, NEWCOMER_CHECKS_PER_S
from swarm.types import Advert, NodeId
from swarm.wire.adverts import MAX_ADVERT_TTL_S, open_advert

MAX_VALUE_BYTES = 1024
"""Largest value of a record."""

MAX_RECORDS_PER_SHARD = 128
"""Most adverts that a node keeps, serves or reads under one key."""

CHECKED_AT_ONCE = 32
"""Records that are checked before others have their turn of the event loop: some milliseconds."""

MAX_REPLY_BYTES = 160 * 1024
"""Largest answer to a read that is parsed: a full shard, and some slack."""

_KEY_BYTES = 32
_MAX_VERIFIED = 4096  # adverts remembered as verified, about 3 KB each
_MAX_RELAYS = 4  # whose adverts are kept


def check_own(advert: Advert, node_id: NodeId, run_id: str, now_s: float) -> None:
    """Asserts the bounds of an advert that a node announces in any directory, this one or the virtual one."""
    assert advert.node_id == node_id, f"{advert.node_id} is not this node, {node_id}"
    assert advert.run_id == run_id, f"run {advert.run_id!r} is not {run_id!r}"
    assert now_s < advert.expires_at_s <= now_s + MAX_ADVERT_TTL_S, (
        f"expiry in {advert.expires_at_s - now_s} s, at most {MAX_ADVERT_TTL_S}"
    )


def shard_key(run_id: str, shard: int) -> str:
    """The DHT key of one shard of a run."""
    return f"swarm/v1/{run_id}/peers/{shard}"


def shard_of(public_key: bytes, shards: int) -> int:
    """The shard that an author's advert lives in."""
    return int.from_bytes(hashlib.sha256(public_key).digest(), "big") % shards


Entry = tuple[bytes, bytes, float]
"""Sub-key, value and expiry of an unchecked record."""

Checked = tuple[bytes, Advert]
"""Value and advert of a checked record."""


def in_turn(answers: Sequence[Sequence[Entry]]) -> Iterator[Entry]:
    """Yields the first record of each replica, then the second of each, and so on.

    Each replica has an equal part of the checks that there is time for, and of the places in a table that keeps those
    who come first. An honest replica lists the authors that it has known longest first, whatever others answer.
    """
    for entries in zip_longest(*(answer[: 2 * MAX_RECORDS_PER_SHARD] for answer in answers)):
        yield from (entry for entry in entries if entry is not None)


class RecordChecker:
    """Decides which records are adverts of this run. A record that is known as verified is not verified again.

    Authors that were verified before have their own rate limit, so that a flood of new identities cannot keep known
    nodes from refreshing. Records exchanged with relays have another, so that neither side uses up the other's checks.
    """

    def __init__(
        self,
        run_id: str,
        shards: int,
        clock: Clock,
        entry: EntryRule | None = None,
        held: Callable[[int, bytes], Checked | None] = lambda shard, public_key: None,
    ) -> None:
        """Creates a checker.

        Args:
            entry: rule that decides whose adverts count; None: all adverts count.
            held: returns the record of a shard's author from a table out of which a flood cannot drive it, or None.
        """
        self._run_id, self._shards, self._clock, self._entry, self._held = run_id, shards, clock, entry, held
        self._verified = BoundedTable[bytes, Checked](_MAX_VERIFIED)  # author -> newest record
        # One second's worth of signature checks in advance.
        self._buckets = {
            (is_known, by_relay): TokenBucket(per_s, per_s, clock.monotonic_s())
            for is_known, per_s in ((True, KNOWN_CHECKS_PER_S), (False, NEWCOMER_CHECKS_PER_S))
            for by_relay in (True, False)
        }
        self.num_deferred = 0  # records refused only because too many came at once

    def open(
        self, shard: int, public_key: bytes, data: bytes, expires_at_s: float, *, by_relay: bool = False
    ) -> Advert | None:
        """The advert in an unchecked record; None if the record is invalid, not admitted, or over the rate limit.

        Args:
            shard: the shard that the record was found in or sent for.
            public_key: the record's sub-key.
            data: the record's value.
            expires_at_s: the record's expiry in the DHT; must equal the signed one.
            by_relay: the record came in a call between a relay and a node behind it, not through the DHT.
        """
        now_s = self._clock.now_s()
        if (
            len(public_key) != _KEY_BYTES
            or len(data) > MAX_VALUE_BYTES
            or not math.isfinite(expires_at_s)
            or not now_s < expires_at_s <= now_s + MAX_ADVERT_TTL_S
            or shard_of(public_key, self._shards) != shard
        ):
            return None
        last = self._verified.get(public_key) or self._held(shard, public_key)
        if last is not None and last[0] == data:
            return last[1] if last[1].expires_at_s == expires_at_s and self.may_enter(last[1]) else None
        if not self._buckets[last is not None, by_relay].try_take(self._clock.monotonic_s()):
            self.num_deferred += 1
            return None
        advert = open_advert(data, now_s)
        if advert is None or advert.run_id != self._run_id or advert.expires_at_s != expires_at_s:
            return None
        if advert.node_id != node_id_of(public_key) or not self.may_enter(advert):
            return None
        if last is None or last[1].expires_at_s < advert.expires_at_s:
            self._verified[public_key] = (data, advert)
        return advert

    def may_enter(self, advert: Advert) -> bool:
        """True if the advert's author may take part, as far as is known now."""
        return self._entry is None or self._entry.admits(advert.node_id, advert.credential)


@dataclass(frozen=True, slots=True)
class Record:
    """One verified advert as stored."""

    data: bytes
    expires_at_s: float
    rank: bytes  # private hash of the author: decides among newcomers
    advert: Advert | None  # content of `data`; None in `AdvertStorage`, which needs only the bytes


class ShardRecords:
    """The records of one shard: at most `capacity` authors, the newest record of each.

    In a full table the half of the authors that came first stays while they refresh; newcomers share the other half by
    a hash that only this node can compute. So neither many nor chosen identities win more than that half.
    """

    def __init__(self, capacity: int = MAX_RECORDS_PER_SHARD) -> None:
        self._capacity = capacity
        self._salt = secrets.token_bytes(16)
        self._records: dict[bytes, Record] = {}  # in order of first arrival

    def put(
        self, public_key: bytes, data: bytes, expires_at_s: float, now_s: float, advert: Advert | None = None
    ) -> bool:
        """Keeps a verified record; False if another record that expires no earlier is held, or if there is no room."""
        held = self._records.get(public_key)
        if held is not None:
            if held.expires_at_s >= expires_at_s:
                return held.data == data
            self._records[public_key] = Record(data, expires_at_s, held.rank, advert)
            return True
        if len(self._records) >= self._capacity:
            self._drop_expired(now_s)
        rank = hashlib.blake2b(public_key, key=self._salt, digest_size=16).digest()
        if len(self._records) >= self._capacity:
            newcomers = list(self._records.items())[self._capacity // 2 :]
            last, record = max(newcomers, key=lambda entry: entry[1].rank)
            if record.rank <= rank:
                return False
            del self._records[last]
        self._records[public_key] = Record(data, expires_at_s, rank, advert)
        return True

    def items(self, now_s: float) -> Iterator[tuple[bytes, Record]]:
        """Public keys of the authors and their unexpired records."""
        self._drop_expired(now_s)
        return iter(list(self._records.items()))

    def get(self, public_key: bytes) -> Record | None:
        """The record of an author, which may have expired; None if there is none."""
        return self._records.get(public_key)

    def __len__(self) -> int:
        return len(self._records)

    def _drop_expired(self, now_s: float) -> None:
        for public_key in [key for key, record in self._records.items() if record.expires_at_s <= now_s]:
            del self._records[public_key]


class SeenRecords:
    """The records of all shards, kept separately for the DHT and the newest relays: no source takes another's room.

    Each source has room for 2 * MAX_RECORDS_PER_SHARD records in each shard, of some 3 KB: at most 4 MB a shard.

    Args:
        shards: number of shards of the run.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._of_dht = self._empty()
        self._of_relays = BoundedTable[NodeId, list[ShardRecords]](_MAX_RELAYS)  # those that gave one last

    def _empty(self) -> list[ShardRecords]:
        return [ShardRecords(2 * MAX_RECORDS_PER_SHARD) for _ in range(self._shards)]

    def put(self, shard: int, public_key: bytes, data: bytes, advert: Advert, now_s: float, relay: NodeId = "") -> bool:
        """Keeps a verified record that came from a relay ("": from the DHT); returns the same as `ShardRecords.put`."""
        tables = self._of_dht
        if relay:
            tables = self._of_relays[relay] = self._of_relays.get(relay) or self._empty()
        return tables[shard].put(public_key, data, advert.expires_at_s, now_s, advert)

    def newest(self, shard: int, public_key: bytes) -> Record | None:
        """The newest record of an author from any source, which may have expired; None if there is none."""
        found = [tables[shard].get(public_key) for tables in (self._of_dht, *self._of_relays.values())]
        return max(filter(None, found), key=lambda record: record.expires_at_s, default=None)

    def checked(self, shard: int, public_key: bytes) -> Checked | None:
        """The newest record of an author as the argument `held` of a `RecordChecker` returns it."""
        record = self.newest(shard, public_key)
        return None if record is None or record.advert is None else (record.data, record.advert)

    def items(self, now_s: float) -> Iterator[Checked]:
        """The newest unexpired record of each author."""
        newest: dict[bytes, Record] = {}
        for tables in (self._of_dht, *self._of_relays.values()):
            for records in tables:
                for public_key, record in records.items(now_s):
                    held = newest.get(public_key)
                    if held is None or held.expires_at_s < record.expires_at_s:
                        newest[public_key] = record
        return ((record.data, record.advert) for record in newest.values() if record.advert is not None)
