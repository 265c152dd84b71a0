"""Notices of groups that wait to be fetched from one neighbour: the origins that it names take turns.

Invariant: one group of each origin is fetched or judged at a time, and beside the neighbour's own at most MAX_AT_ONCE
groups and the bytes of two of the largest size. So a slow verdict holds up its own origin only, and the neighbour's own
groups wait for nobody else's. At most MAX_WAITING notices wait. Known origins go first except for one turn in SHARE,
keep half of the places under way, and lose waiting notices last: keys are free, and an honest neighbour passes on the
groups of each. A neighbour is asked for a group at most MAX_TRIES times.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from swarm.fairness import FairTable
from swarm.flow import BoundedTable, Signal
from swarm.peers.peer_table import MAX_PEERS
from swarm.peers.quotas import MAX_NEIGHBOURS
from swarm.trust_policy import SHARE
from swarm.types import Cursor, Digest, NodeId

MAX_WAITING: Final = 256  # notices of one neighbour: no more than its commitments that are remembered
MAX_AT_ONCE: Final = 16  # groups of one neighbour that are fetched or judged, beside its own
MAX_OF_NEWCOMERS: Final = MAX_AT_ONCE // 2
MAX_TRIES: Final = 12  # at one group: with the growing pauses of a neighbour that fails about a minute
PATIENCE_S: Final = 1.0  # time for room to come, while nothing is read from the neighbour


@dataclass(frozen=True, slots=True)
class Notice:
    """Announcement of a group by a neighbour that holds it."""

    digest: Digest
    size_bytes: int  # as the neighbour claims; no more is fetched
    origin: NodeId  # its producer, as the neighbour claims; may be empty
    num_failed: int = 0  # tries to fetch it here


class Notices:
    """Groups that one neighbour announced and has not delivered, over all its connections.

    Args:
        neighbour: peer that sent the notices; its own groups go first.
        max_group_bytes: size of the largest group.
        standing: rank of an origin, 0 if it is not known.

    Example:
        await notices.add(notice)
        await notices.changed.until(notices.has_next)
        notice = notices.take()
        ...  # it is fetched and judged
        notices.end(notice)
    """

    def __init__(
        self, neighbour: NodeId, max_group_bytes: int, standing: Callable[[NodeId], int] = lambda _: 0
    ) -> None:
        self._neighbour, self._standing = neighbour, standing
        self._max_bytes = 2 * max_group_bytes
        self._known, self._new = FairTable[NodeId, Digest](), FairTable[NodeId, Digest]()  # that wait, by origin
        self._notices: dict[Digest, Notice] = {}  # waiting and under way
        self._under_way: dict[NodeId, Notice] = {}  # by origin
        self._is_new: dict[NodeId, bool] = {}  # origins under way: nothing was known of it
        self._num_known = 0  # taken of known origins, since the last one of another
        self._is_stuck = False  # no room came in time, and half of the table is not free again
        self.changed = Signal()
        self.num_dropped = 0  # because there was no room, or never delivered

    def __len__(self) -> int:
        return len(self._known) + len(self._new)

    @property
    def num_under_way(self) -> int:
        """Number of groups that are fetched or judged now."""
        return len(self._under_way)

    async def add(self, notice: Notice) -> None:
        """Adds a notice from the neighbour, unless it is there; without room, first waits, PATIENCE_S at most."""
        if notice.digest not in self._notices and len(self) >= MAX_WAITING and not self._is_stuck:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self.changed.until(lambda: len(self) < MAX_WAITING)
            except TimeoutError:
                self._is_stuck = True
        self.put(notice)

    def put(self, notice: Notice) -> None:
        """Adds a notice at once, unless it is there; without room, unknown origins lose notices before known ones."""
        if notice.digest in self._notices:
            return
        if len(self) >= MAX_WAITING:
            table = self._new or self._known
            dropped = self._notices.pop(table.oldest_of_longest())
            table.remove(dropped.origin, dropped.digest)
            self.num_dropped += 1
        self._notices[notice.digest] = notice
        is_known = notice.origin == self._neighbour or self._standing(notice.origin) > 0
        (self._known if is_known else self._new).add(notice.origin, notice.digest)
        self.changed.fire()

    def has_next(self) -> bool:
        """True if a waiting group may be fetched now."""
        return self._next() is not None

    def take(self) -> Notice:
        """Takes the next notice, which is under way until `end` or `put_back`. Call it only where `has_next` holds."""
        found = self._next()
        assert found is not None
        table, origin = found
        notice = self._under_way[origin] = self._notices[table.pop_oldest(origin)]
        self._is_new[origin] = table is self._new
        self._num_known = 0 if table is self._new else self._num_known + 1
        if len(self) <= MAX_WAITING // 2:
            self._is_stuck = False
        self.changed.fire()
        return notice

    def end(self, notice: Notice) -> None:
        """Removes a notice under way whose group was judged, or need not be fetched here."""
        del self._notices[notice.digest], self._under_way[notice.origin], self._is_new[notice.origin]
        self.changed.fire()

    def put_back(self, notice: Notice, *, has_failed: bool = True) -> None:
        """Puts a notice under way behind the others of its origin; drops it after MAX_TRIES failures.

        `has_failed`: False if the attempt broke off without a failure of the neighbour.
        """
        self.end(notice)
        tried = replace(notice, num_failed=notice.num_failed + has_failed)
        if tried.num_failed < MAX_TRIES:
            self.put(tried)
        else:
            self.num_dropped += 1

    def _next(self) -> tuple[FairTable[NodeId, Digest], NodeId] | None:
        """The table and the origin whose oldest notice is next; None if none may be fetched now."""
        under_way = self._under_way
        if self._neighbour in self._known.parties and self._neighbour not in under_way:
            return self._known, self._neighbour
        others = [notice for origin, notice in under_way.items() if origin != self._neighbour]
        if len(others) >= MAX_AT_ONCE:
            return None
        # Few are under way, so the first that is not is found soon.
        known = next((origin for origin in self._known.parties if origin not in under_way), None)
        new = None
        if sum(self._is_new.values()) < MAX_OF_NEWCOMERS:
            new = next((origin for origin in self._new.parties if origin not in under_way), None)
        is_turn_of_new = known is None or (new is not None and self._num_known >= SHARE - 1)
        table, origin = (self._new, new) if is_turn_of_new else (self._known, known)
        if origin is None:
            return None
        size_bytes = self._notices[table.oldest(origin)].size_bytes
        has_room = not others or size_bytes + sum(other.size_bytes for other in others) <= self._max_bytes
        return (table, origin) if has_room else None


class StreamPositions:
    """Cursor in the stream of each neighbour, and notices from it that were not fetched yet."""

    def __init__(self, max_group_bytes: int) -> None:
        self._max_group_bytes = max_group_bytes
        self.cursors = BoundedTable[NodeId, Cursor](MAX_PEERS)
        self._notices = BoundedTable[NodeId, Notices](MAX_NEIGHBOURS)

    def notices_of(self, neighbour: NodeId, standing: Callable[[NodeId], int]) -> Notices:
        """The neighbour's notices, kept over its streams; empty if there was none lately."""
        notices = self._notices.get(neighbour)
        if notices is None:
            notices = self._notices[neighbour] = Notices(neighbour, self._max_group_bytes, standing)
        return notices
