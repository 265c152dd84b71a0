"""Address book: the addresses at which other nodes proved their keys, and those that may be dialled now.

Invariant: an advert only claims an address. An address where its author has not proved its key is dialled a bounded
number of times, per subnet and in all, whatever is advertised and by however many keys; every table is bounded.
"""

import ipaddress
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from swarm.addresses import dialable_anchor, public_subnet_of, relayed_endpoint, split_relayed
from swarm.clock import Clock
from swarm.flow import BoundedTable, RateLimiter, TokenBucket
from swarm.interfaces import PeerAddress
from swarm.process import write_json
from swarm.read_files import read_json
from swarm.trust_policy import (
    ALIVE_BURST,
    KNOWN_BURST,
    KNOWN_PER_S,
    RESERVE,
    STRANGERS_BURST,
    STRANGERS_PER_S,
    SUBNET_BURST,
    SUBNET_PER_S,
)
from swarm.types import Advert, NodeId

logger = logging.getLogger(__name__)

KNOWN_PEERS: Final = "known-peers.json"  # in the node's directory
MAX_KNOWN: Final = 512  # peers that answered; beyond it the newest of them makes room for the next
MAX_REMEMBERED: Final = 64  # of them on the disk
MAX_ENDPOINTS: Final = 4096  # of which failures are remembered
QUICK_TRIES: Final = 3  # failures in a row before a known peer leaves the choice
FIRST_PAUSE_S: Final = 5.0  # then, or after the first failure of a stranger; doubles with each one more
LONGEST_PAUSE_KNOWN_S: Final = 300.0
LONGEST_PAUSE_S: Final = 3600.0
FORGOTTEN_AFTER: Final = 24  # failures in a row of a known peer: about an hour and a half

BEYOND_REACH: Final = 2  # peers in a row that only our own relays led to: only port 443 may get out
LEADING_TRIES: Final = 16  # failures through a relay that led us somewhere, after which it is an address like others
_MAX_FILE_BYTES: Final = 64 * 1024


@dataclass(slots=True)
class KnownPeer:
    """A peer that proved its key at an address."""

    address: PeerAddress
    since_s: float  # wall clock of its first answer
    credential: bytes = b""  # credential in its newest advert


@dataclass(slots=True)
class _Failures:
    num_in_row: int = 0
    next_try_s: float = -math.inf  # monotonic


class AddressBook:
    """Addresses of other nodes: proofs, failures and dial budgets.

    Args:
        clock: measures pauses, rates and the age of peers.
        rng: jitter of pauses; seeded differently at each node.
        anchors: addresses of long-lived nodes that the run names.

    Example:
        if book.begin_dial(address):
            client = await transport.connect(address, timeout_s)
            book.record_answer(address)  # or record_failure
    """

    def __init__(self, clock: Clock, rng: random.Random, anchors: Sequence[PeerAddress] = ()) -> None:
        self._clock, self._rng = clock, rng
        self.anchors = tuple(anchors)
        self._anchor_ids = frozenset(anchor.node_id for anchor in anchors)
        self.known: dict[NodeId, KnownPeer] = {}
        self._owners: dict[str, NodeId] = {}  # `PeerAddress.location` -> known peer
        self._failures = BoundedTable[str, _Failures](MAX_ENDPOINTS)  # by location, for all nodes that claim it
        # relays, by endpoint, through which a node answered -> failed dials through the relay since
        self._leading = BoundedTable[str, int](MAX_ENDPOINTS)
        self._false_claims = BoundedTable[str, int](MAX_ENDPOINTS)  # by key, and by subnet from which keys called
        now_s = clock.monotonic_s()
        self._known_dials = TokenBucket(KNOWN_PER_S, KNOWN_BURST, now_s)
        self._stranger_dials = TokenBucket(STRANGERS_PER_S, STRANGERS_BURST, now_s)
        self._per_subnet = {  # of peers known to be alive, of all others
            True: RateLimiter[str](SUBNET_PER_S, ALIVE_BURST, MAX_ENDPOINTS),
            False: RateLimiter[str](SUBNET_PER_S, SUBNET_BURST, MAX_ENDPOINTS),
        }
        self.relays: tuple[PeerAddress, ...] = ()  # at which we hold reservations: others may not be in reach otherwise
        self.num_answered = self.num_failed = 0  # dials since the process started
        self.newest_error = ""  # why one of them failed
        # peers that failed at their own address or at another relay, and the number reached in a row through ours since
        self._failed_beyond = BoundedTable[NodeId, None](MAX_ENDPOINTS)
        self._num_beyond = 0

    # --- whether to dial -------------------------------------------------------------------------

    def best_address(self, node_id: NodeId, endpoints: Sequence[str]) -> PeerAddress:
        """The best address to dial a node at now: one where it proved its key, else the first that may be dialled.

        If none may be dialled now, the first of all in the same order. Addresses at our own relays come after the
        node's endpoints, or before them once only our relays have led to BEYOND_REACH peers in a row.

        Args:
            node_id: the node.
            endpoints: the endpoints that the node advertises, best first.
        """
        around = [relayed_endpoint(relay.endpoint, relay.node_id) for relay in self.relays]
        if self._num_beyond >= BEYOND_REACH:
            endpoints, around = around, list(endpoints)
        offered = [PeerAddress(node_id=node_id, endpoint=endpoint) for endpoint in (*endpoints, *around)]
        offered.sort(key=lambda address: not self.is_known(address))
        return next(filter(self.may_dial, offered), offered[0])

    def is_known(self, address: PeerAddress) -> bool:
        """True if the node of the address was the last to prove its key there."""
        return self._owners.get(address.location) == address.node_id

    def endpoint_of(self, node_id: NodeId) -> str | None:
        """Endpoint at which a node proved its key; None if it did not."""
        peer = self.known.get(node_id)
        return None if peer is None else peer.address.endpoint

    def is_anchor(self, node_id: NodeId) -> bool:
        """True if the run names this node as an anchor."""
        return node_id in self._anchor_ids

    def may_dial(self, address: PeerAddress) -> bool:
        """False if another node proved its key there, or in the pause after failures of the address or its relay."""
        if self._owners.get(address.location, address.node_id) != address.node_id:
            return False
        if address.relay is not None and not self.may_dial(address.relay):
            return False
        failures = self._failures.get(address.location)
        return failures is None or failures.next_try_s <= self._clock.monotonic_s()

    def begin_dial(self, address: PeerAddress, *, is_alive: bool = False) -> bool:
        """Charges a dial to the budgets; False, without a charge, if the address must not be dialled now.

        Args:
            address: the address to dial.
            is_alive: its node is known to be in the swarm, so claims of strangers do not use up its subnet's budget.
        """
        now_s = self._clock.monotonic_s()
        if not self.may_dial(address):
            return False
        if self._is_trusted(address):
            return self._known_dials.try_take(now_s)
        if not self._stranger_dials.try_take(now_s, keep=0.0 if is_alive else RESERVE):
            return False
        if self._is_relayed_freely(address):
            return True  # it is there for that: a false claim costs its own pause, and nothing of others behind it
        if not self._per_subnet[is_alive].try_take(budget_key_of(address.endpoint), now_s):
            self._stranger_dials.put_back(now_s)
            return False
        return True

    def _is_leading(self, address: PeerAddress) -> bool:
        """True if the address is behind a relay through which a node answered lately."""
        return address.relay is not None and self._leading.get(address.endpoint, LEADING_TRIES) < LEADING_TRIES

    def _is_relayed_freely(self, address: PeerAddress) -> bool:
        """True if no subnet's budget bounds dials of the address: its relay led somewhere lately, or is our own."""
        return self._is_leading(address) or address.relay in self.relays

    def _is_trusted(self, address: PeerAddress) -> bool:
        return self.is_known(address) or address in self.anchors

    # --- what came of it -------------------------------------------------------------------------

    def record_answer(self, address: PeerAddress, *, is_alive: bool = False) -> None:
        """Records that the node proved its key at the address: the dial is refunded, other claims are void."""
        now_s = self._clock.monotonic_s()
        self.num_answered += 1
        if address.relay not in self.relays:
            self._num_beyond = 0
        elif address.node_id in self._failed_beyond:  # a dead address alone says nothing: adverts of it are free
            del self._failed_beyond[address.node_id]
            self._num_beyond += 1
        if self._is_trusted(address):
            self._known_dials.put_back(now_s)
        else:
            self._stranger_dials.put_back(now_s)
            if not self._is_relayed_freely(address):
                self._per_subnet[is_alive].put_back(budget_key_of(address.endpoint), now_s)
            self._failures.pop(address.location, None)
        if address.relay is not None:
            self._leading[address.endpoint] = 0
        self._false_claims.pop(address.node_id, None)
        self._add(address, self._clock.now_s())

    def record_working(self, address: PeerAddress) -> None:
        """Forgets the failures of an address whose stream brought something, or lasted."""
        self._failures.pop(address.location, None)

    def observe(self, adverts: Iterable[Advert]) -> None:
        """Stores the credentials that known peers show in these adverts."""
        for advert in adverts:
            if advert.node_id in self.known:
                self.known[advert.node_id].credential = advert.credential

    def num_false_claims(self, node_id: NodeId, caller: str = "") -> int:
        """Number of failed addresses claimed by this key, or by keys that called from `caller`, if that is more."""
        return max(self._false_claims.get(node_id, 0), self._false_claims.get(caller, 0) if caller else 0)

    def _count_false_claim(self, node_id: NodeId, caller: str) -> None:
        for claimant in filter(None, (node_id, caller)):
            self._false_claims[claimant] = self._false_claims.get(claimant, 0) + 1

    def record_failure(self, address: PeerAddress, caller: str = "") -> None:
        """Records a dial to an address where no node answered, or the answer was of no use.

        Args:
            address: the dialled address.
            caller: subnet from which the author of the address called us; "" if it did not.
        """
        self.num_failed += 1
        if address.relay not in self.relays:
            self._failed_beyond[address.node_id] = None
        if not self._is_trusted(address) and not self._is_leading(address):  # else the relay may have failed
            self._count_false_claim(address.node_id, caller)
        if address.endpoint in self._leading:
            self._leading[address.endpoint] += 1
        failures = self._failures.get(address.location) or _Failures()
        failures.num_in_row += 1
        self._failures[address.location] = failures
        is_trusted = self._is_trusted(address)
        num_pauses = failures.num_in_row - (QUICK_TRIES if is_trusted and address.relay is None else 1)
        if num_pauses >= 0:
            longest_s = LONGEST_PAUSE_KNOWN_S if is_trusted else LONGEST_PAUSE_S
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(num_pauses, 20), longest_s)
            failures.next_try_s = self._clock.monotonic_s() + pause_s * self._rng.uniform(0.5, 1.0)
        if failures.num_in_row >= FORGOTTEN_AFTER and self.is_known(address):
            self._forget(address.node_id)

    def record_other(self, address: PeerAddress, other: NodeId, caller: str = "") -> None:
        """Records that a node other than the expected one proved its key there, which voids all other claims.

        A node whose known address works keeps that address: a liar could forward calls from this one and then cut them
        off. If the address is behind a relay, the answer only counts as a failure.

        Args:
            address: the dialled address.
            other: id of the node that answered.
            caller: as in `record_failure`.
        """
        if address.relay is not None:  # which led us elsewhere: nothing that its author did
            self.record_failure(address)
            return
        known = self.known.get(other)
        if known is not None and known.address.endpoint != address.endpoint and not self._is_failing(known):
            self.record_failure(address, caller)
            return
        self._count_false_claim(address.node_id, caller)
        self.num_failed += 1
        self._failures.pop(address.location, None)
        self._add(PeerAddress(node_id=other, endpoint=address.endpoint), self._clock.now_s())

    def _add(self, address: PeerAddress, since_s: float) -> None:
        before, credential = self.known.get(address.node_id), b""
        if before is not None:
            since_s, credential = before.since_s, before.credential
            if before.address != address:
                del self._owners[before.address.location]
        owner = self._owners.get(address.location, address.node_id)
        if owner != address.node_id:
            self._forget(owner)
        self.known[address.node_id] = KnownPeer(address=address, since_s=since_s, credential=credential)
        self._owners[address.location] = address.node_id
        if len(self.known) > MAX_KNOWN:
            others = (peer for peer in self.known.values() if peer.address != address)
            self._forget(max(others, key=lambda peer: (self._is_failing(peer), peer.since_s)).address.node_id)

    def _forget(self, node_id: NodeId) -> None:
        del self._owners[self.known.pop(node_id).address.location]

    def _is_failing(self, peer: KnownPeer) -> bool:
        failures = self._failures.get(peer.address.location)
        return failures is not None and failures.num_in_row >= QUICK_TRIES

    # --- on the disk -----------------------------------------------------------------------------

    def restore(self, path: Path, admits: Callable[[NodeId, bytes], bool]) -> None:
        """Adds the peers that an earlier process saved (blocking); invalid entries are skipped.

        Args:
            path: path of the file, which may be missing or hold anything.
            admits: returns True if a peer may take part with the credential that it showed.
        """
        for peer in _read(path):
            node_id = peer.address.node_id
            if node_id in self.known or peer.address.location in self._owners or not admits(node_id, peer.credential):
                continue
            self._add(peer.address, min(peer.since_s, self._clock.now_s()))
            self.known[node_id].credential = peer.credential

    def to_remember(self) -> list[dict[str, object]]:
        """Entries for `save_known_peers`: working peers behind no relay, known longest first, a bounded number."""
        direct = (peer for peer in self.known.values() if peer.address.relay is None and not self._is_failing(peer))
        working = sorted(direct, key=lambda peer: peer.since_s)
        return [
            {
                "node_id": peer.address.node_id,
                "endpoint": peer.address.endpoint,
                "since_s": peer.since_s,
                "credential": peer.credential.hex(),
            }
            for peer in working[:MAX_REMEMBERED]
        ]


def save_known_peers(path: Path, peers: Sequence[dict[str, object]]) -> None:
    """Replaces the file of known peers (blocking); a failed write is only logged."""
    try:
        write_json(path, {"peers": list(peers)})
    except OSError as error:
        logger.warning("known peers were not written", extra={"path": str(path), "error": str(error)})


def anchor_of(text: str) -> PeerAddress:
    """The address in NODE_ID@host:port. Raises ValueError for any other text."""
    node_id, _, endpoint = dialable_anchor(text).partition("@")
    return PeerAddress(node_id=node_id, endpoint=endpoint)


@lru_cache(maxsize=2**14)
def budget_key_of(endpoint: str) -> str:
    """Budget that an endpoint counts against: its public subnet, or the domain of its name; a relayed one, its relay's.

    Each loopback or private endpoint, port included, has its own budget: many nodes of one lab share a machine.
    """
    endpoint = split_relayed(endpoint)[0]
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.lower().rstrip(".").split(".")
        # A name of digits is another spelling of an address (16909060 is 1.2.3.4): all of them share one budget.
        return "digits" if labels[-1][:1].isdigit() else ".".join(labels[-2:])
    return public_subnet_of(host) or endpoint


def is_public(endpoint: str) -> bool:
    """True if the host of an endpoint is a public IP address, of which one party holds a whole subnet."""
    return public_subnet_of(endpoint.rpartition(":")[0]) is not None


def _read(path: Path) -> Iterable[KnownPeer]:
    try:
        entries = cast("list[Any]", read_json(path, _MAX_FILE_BYTES)["peers"])[:MAX_REMEMBERED]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "known peers cannot be read; they are found anew", extra={"path": str(path), "error": str(error)}
        )
        return
    for entry in entries:
        try:
            address, since_s = anchor_of(f"{entry['node_id']}@{entry['endpoint']}"), float(entry["since_s"])
            credential = bytes.fromhex(entry["credential"])
        except (ValueError, KeyError, TypeError):
            continue
        if math.isfinite(since_s):
            yield KnownPeer(address=address, since_s=since_s, credential=credential)
