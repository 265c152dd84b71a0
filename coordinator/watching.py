"""Who waits for new heads of which lineage: a bounded number of watches, each with at most one version to tell.

Invariant: a watcher that reads slowly skips to the newest head; it never makes anything grow or wait. Single event
loop, no threads.
"""

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from swarm.errors import Unavailable
from swarm.types import NodeId, PolicyVersion

WATCHES_PER_NODE: Final = 4  # two lineages, and those of a connection that just broke
WATCHES_TOTAL: Final = 1024


class Watch:
    """One watcher of one lineage."""

    def __init__(self) -> None:
        self._pending: PolicyVersion | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self, head: PolicyVersion) -> None:
        """The lineage has a new head; one that was not read yet is forgotten."""
        self._pending = head
        self._wake()

    def end(self) -> None:
        """Nothing comes any more, nor is what was not read yet given out."""
        self._is_ended = True
        self._wake()

    async def next(self) -> PolicyVersion:
        """The newest head, as soon as there is one that was not read. One reader. Raises Unavailable at the end."""
        while self._pending is None and not self._is_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_ended or self._pending is None:
            raise Unavailable("the coordinator stops")
        head, self._pending = self._pending, None
        return head

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Watches:
    """The watches of one coordinator.

    Example:
        with watches.open(node_id, policy_id) as watch:
            head = await watch.next()
    """

    def __init__(self, per_node: int = WATCHES_PER_NODE, total: int = WATCHES_TOTAL) -> None:
        self._per_node = per_node
        self._total = total
        self._of_node: Counter[NodeId] = Counter()
        self._of_lineage: dict[str, set[Watch]] = {}
        self._is_ended = False

    @property
    def num_open(self) -> int:
        """Watches open now."""
        return self._of_node.total()

    @contextmanager
    def open(self, node_id: NodeId, policy_id: str) -> Generator[Watch]:
        """A watch of a lineage, which may not exist yet. Raises Unavailable at the bounds."""
        self._require_room(node_id)
        watch = Watch()
        self._of_node[node_id] += 1
        self._of_lineage.setdefault(policy_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._forget(node_id, policy_id, watch)

    def tell(self, head: PolicyVersion) -> None:
        """A lineage has a new head."""
        for watch in self._of_lineage.get(head.policy_id, ()):
            watch.tell(head)

    def end(self) -> None:
        """Ends every watch, and refuses those to come: the coordinator stops."""
        self._is_ended = True
        for watches in self._of_lineage.values():
            for watch in watches:
                watch.end()

    def _require_room(self, node_id: NodeId) -> None:
        if self._is_ended:
            raise Unavailable("the coordinator stops")
        if self._of_node[node_id] >= self._per_node:
            raise Unavailable(f"{self._per_node} watches of this node are open; close one first")
        if self.num_open >= self._total:
            raise Unavailable(f"{self._total} watches are open; heads are in the directory too")

    def _forget(self, node_id: NodeId, policy_id: str, watch: Watch) -> None:
        self._of_node[node_id] -= 1
        if not self._of_node[node_id]:
            del self._of_node[node_id]
        self._of_lineage[policy_id].discard(watch)
        if not self._of_lineage[policy_id]:
            del self._of_lineage[policy_id]
