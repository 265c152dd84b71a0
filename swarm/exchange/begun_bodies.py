"""Bodies that come in pieces, and go on where a transfer of them broke off.

Invariant: every length that a peer names is checked before its bytes are kept; what is kept is bounded. What the bytes
are is not looked at here.
"""

from collections import Counter
from typing import Any, Final

from swarm.clock import Clock
from swarm.errors import TooLarge, Unavailable
from swarm.exchange.exchange_servicer import FETCH_BYTES
from swarm.types import Digest, NodeId

LEAST_PIECE_BYTES: Final = 2**16  # but for the last: a byte at a time, one body would take a million calls
MAX_BEGUN_BYTES: Final = 16 * 2**20
KEPT_S: Final = 120.0  # who wants the rest of a body asks for it sooner


class FalsePiece(Unavailable):
    """A body does not go on as it must: what came of it is of no use."""


class BegunBodies:
    """What came of bodies whose transfer broke off, for who asks the same peer for them again.

    By peer: who sent a false beginning spoils only what it sends itself. Beyond `max_bytes` who has most loses the
    oldest; after KEPT_S all do, or many keys with a little each would leave no room for ever.
    """

    def __init__(self, clock: Clock, max_bytes: int = MAX_BEGUN_BYTES) -> None:
        self._clock, self._max_bytes = clock, max_bytes
        self._bodies: dict[tuple[NodeId, Digest], tuple[bytearray, float]] = {}  # and since when; the oldest first

    def take(self, peer: NodeId, digest: Digest) -> bytearray:
        """What came, which is no longer kept; empty where nothing is known."""
        return self._bodies.pop((peer, digest), (bytearray(), 0.0))[0]

    def keep(self, peer: NodeId, digest: Digest, data: bytearray) -> None:
        """Remembers what came."""
        now_s = self._clock.monotonic_s()
        self._bodies.pop((peer, digest), None)
        if data:
            self._bodies[peer, digest] = data, now_s
        for key in [key for key, (_, since_s) in self._bodies.items() if since_s + KEPT_S < now_s]:
            del self._bodies[key]
        while sum(len(body) for body, _ in self._bodies.values()) > self._max_bytes:
            num_bytes = Counter[NodeId]()
            for (owner, _), (body, _) in self._bodies.items():
                num_bytes[owner] += len(body)
            most, _ = num_bytes.most_common(1)[0]
            del self._bodies[next(key for key in self._bodies if key[0] == most)]


def append_piece(data: bytearray, response: Any, total: int | None, max_bytes: int, what: str) -> int:
    """Adds one piece to `data` after checking every length in it; returns the total it names."""
    size = response.total_bytes
    if size > max_bytes:
        raise TooLarge(f"{what}: {size} bytes exceed {max_bytes}")
    if total is not None and size != total:
        raise FalsePiece(f"{what}: the total changed from {total} to {size} bytes")
    if response.offset != len(data):
        raise FalsePiece(f"{what}: piece at {response.offset}, expected {len(data)}")
    rest = size - len(data)
    if not 0 < min(LEAST_PIECE_BYTES, rest) <= len(response.data) <= min(FETCH_BYTES, rest):
        raise FalsePiece(f"{what}: piece of {len(response.data)} bytes at {len(data)} of {size}")
    data += response.data
    return size
