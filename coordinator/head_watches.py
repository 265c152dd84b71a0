"""Watches of lineage heads: a bounded number, each with at most one version that was not read yet.

Invariant: a slow reader skips to the newest head; it makes no table grow and no other watch wait. In a full table a new
watch takes the place of the newest watch of the subnet with most, if that subnet has at least two more than its own.
Single event loop, no threads.
"""

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from swarm.errors import Unavailable
from swarm.fairness import FairTable
from swarm.types import NodeId, PolicyVersion

WATCHES_PER_NODE: Final = 4  # two lineages, and those of a connection that just broke
WATCHES_PER_SUBNET: Final = 256
WATCHES_TOTAL: Final = 1024


class HeadWatch:
    """One watcher of one lineage."""

    def __init__(self, node_id: NodeId, policy_id: str) -> None:
        self.node_id, self.policy_id = node_id, policy_id
        self._pending: PolicyVersion | None = None
        self._end_reason = ""
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, head: PolicyVersion) -> None:
        """Sets the head that `next` returns, in place of one that was not read yet."""
        self._pending = head
        self._wake()

    def end(self, reason: str) -> None:
        """Ends the watch: `next` raises Unavailable with this reason, even if a head was not read yet."""
        self._end_reason = reason
        self._wake()

    async def next(self) -> PolicyVersion:
        """Waits for a head that was not read yet and returns it; for one reader. Raises Unavailable after `end`."""
        while self._pending is None and not self._end_reason:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._end_reason or self._pending is None:
            raise Unavailable(self._end_reason)
        head, self._pending = self._pending, None
        return head

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HeadWatches:
    """The watches of one coordinator.

    Example:
        with watches.open(node_id, policy_id, "1.2.3.0/24") as watch:
            head = await watch.next()
    """

    def __init__(
        self, per_node: int = WATCHES_PER_NODE, total: int = WATCHES_TOTAL, per_subnet: int = WATCHES_PER_SUBNET
    ) -> None:
        self._per_node = per_node
        self._per_subnet = per_subnet
        self._total = total
        self._of_subnet = FairTable[str, HeadWatch]()
        self._of_node: Counter[NodeId] = Counter()
        self._of_lineage: dict[str, set[HeadWatch]] = {}
        self._is_ended = False

    @property
    def num_open(self) -> int:
        """Number of watches that are open."""
        return len(self._of_subnet)

    @contextmanager
    def open(self, node_id: NodeId, policy_id: str, subnet: str) -> Generator[HeadWatch]:
        """Opens a watch of a lineage, which need not exist yet, for the time of a `with`.

        Raises:
            Unavailable: too many watches are open, or the coordinator stops.
        """
        self._require_room(node_id, subnet)
        watch = HeadWatch(node_id, policy_id)
        self._of_subnet.add(subnet, watch)
        self._of_node[node_id] += 1
        self._of_lineage.setdefault(policy_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._forget(subnet, watch)

    def offer(self, head: PolicyVersion) -> None:
        """Offers a new head to every watch of its lineage."""
        for watch in self._of_lineage.get(head.policy_id, ()):
            watch.offer(head)

    def end(self) -> None:
        """Ends every watch and refuses new ones, because the coordinator stops."""
        self._is_ended = True
        for watches in self._of_lineage.values():
            for watch in watches:
                watch.end("the coordinator stops")

    def _require_room(self, node_id: NodeId, subnet: str) -> None:
        if self._is_ended:
            raise Unavailable("the coordinator stops")
        if self._of_node[node_id] >= self._per_node:
            raise Unavailable(f"{self._per_node} watches of this node are open; close one first")
        num_own = len(self._of_subnet.of(subnet))
        if num_own >= self._per_subnet:
            raise Unavailable(f"{num_own} watches of {subnet} are open; heads are in the directory too")
        if self.num_open >= self._total:
            self._make_room(subnet)

    def _make_room(self, subnet: str) -> None:
        most = self._of_subnet.longest(beside=subnet)
        if most is None:
            raise Unavailable(f"{self._total} watches are open; heads are in the directory too")
        newest = self._of_subnet.newest(most)
        newest.end("others have fewer watches open; watch again later")
        self._forget(most, newest)

    def _forget(self, subnet: str, watch: HeadWatch) -> None:
        if not self._of_subnet.remove(subnet, watch):  # it made room
            return
        self._of_node[watch.node_id] -= 1
        if not self._of_node[watch.node_id]:
            del self._of_node[watch.node_id]
        self._of_lineage[watch.policy_id].discard(watch)
        if not self._of_lineage[watch.policy_id]:
            del self._of_lineage[watch.policy_id]
