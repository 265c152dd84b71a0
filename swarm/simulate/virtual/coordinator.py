"""Coordinator of a virtual swarm: the real core in this process, which a fault plan can crash.

Invariant: the contents of the store survive a crash, everything else is lost; a client uses only the calls of
`CoordinatorClient`, `read_head` and `list_members`, which the history records. A call interrupted by a crash is carried
out wholly or not at all, and its caller does not learn which.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from copy import copy

from coordinator.advice import AdviceChange
from coordinator.core import CoordinatorCore
from coordinator.ledger import LedgerEntry
from coordinator.membership import Member
from coordinator.store import MemoryCoordinatorStore, StoredEvaluation
from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.interfaces import Result
from swarm.simulate.coordinator_history import CoordinatorHistory, UnrulyOwner
from swarm.types import Advice, EdgeReport, NodeId, NodeReport, PolicyVersion


class SlowStore(MemoryCoordinatorStore):
    """A store whose writes take random time before and after the data are on the disk."""

    def __init__(self, write_s: float, seed: str) -> None:
        super().__init__()
        self._write_s = write_s
        self._rng = random.Random(f"coordinator store {seed}")
        self.is_dead = False  # the core that writes here crashed

    def next_life(self) -> "SlowStore":
        """Returns a store with the same contents for the next core; later writes to this one raise Unavailable."""
        self.is_dead = True
        following = copy(self)
        following.is_dead = False
        return following

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        await self._write(super().add_versions(entries))

    async def put_member(
        self, member: Member, edges: tuple[EdgeReport, ...], evaluations: list[StoredEvaluation]
    ) -> None:
        await self._write(super().put_member(member, edges, evaluations))

    async def add_advice(self, changes: list[AdviceChange]) -> None:
        await self._write(super().add_advice(changes))

    async def _write(self, write: Coroutine[None, None, None]) -> None:
        try:
            await self._take_time()
            await write
            await self._take_time()
        finally:
            write.close()

    async def _take_time(self) -> None:
        if self._write_s:
            await asyncio.sleep(self._rng.uniform(0.0, 0.5 * self._write_s))
        if self.is_dead:
            raise Unavailable("the coordinator is down")


class VirtualCoordinator:
    """The real coordinator core over a store that survives a crash.

    Args:
        clock: clock of the coordinator.
        write_s: longest time that a write to its disk takes, seconds.
        seed: seed of the times of writes.
        core: class of the core; a test may pass a broken one.
    """

    def __init__(
        self, clock: Clock, write_s: float = 0.0, seed: str = "", core: Callable[..., CoordinatorCore] = CoordinatorCore
    ) -> None:
        self._clock = clock
        self._store = SlowStore(write_s, seed)
        self._make_core = core
        self.history = CoordinatorHistory(clock, is_prompt=True)
        self.core: CoordinatorCore | None = core(clock, self._store)

    def crash(self) -> None:
        """Stops the core: calls raise Unavailable until `restart`, and every watch ends."""
        if self.core is not None:
            self.core.watches.end()
        self.core = None
        self._store = self._store.next_life()

    async def restart(self) -> None:
        """Starts a new core over the same store."""
        core = self._make_core(self._clock, self._store)
        await core.restore()
        self.core = core


class CoreClient:
    """The coordinator as a node calls it, without a network; calls raise Unavailable while the coordinator is down."""

    def __init__(self, coordinator: VirtualCoordinator, node_id: NodeId) -> None:
        self._coordinator = coordinator
        self._history = coordinator.history
        self._node_id = node_id

    @property
    def _core(self) -> CoordinatorCore:
        if self._coordinator.core is None:
            raise Unavailable("the coordinator is down")
        return self._coordinator.core

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the node's lease and returns advice."""
        core = self._core
        with self._history.heartbeat(self._node_id) as call:
            call.advice = advice = await _whole(core.heartbeat(self._node_id, report))
        return advice

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Hands versions of the node's lineage to the ledger, which may refuse some."""
        core = self._core
        with self._history.record(self._node_id, versions) as call:
            answers = await _whole(core.record_versions(self._node_id, versions))
            call.accepted = tuple(answer.accepted for answer in answers)

    async def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        """Yields the head of a lineage, then each newer head; a slow reader may miss some."""
        core = self._core
        with self._history.watch(policy_id) as watch:
            async with aclosing(core.watch_versions(self._node_id, policy_id)) as heads:
                async for head in heads:
                    with watch.seeing(head):
                        yield head

    async def read_head(self, policy_id: str) -> PolicyVersion | None:
        """The head of a lineage in the ledger, as the status page shows it; None if the ledger has none."""
        core = self._core
        with self._history.read_head(policy_id) as call:
            call.head = core.ledger.head(policy_id)
        return call.head

    async def list_members(self) -> dict[NodeId, bool]:
        """Node id of each member -> True if the member's lease runs."""
        core = self._core
        with self._history.list_members() as call:
            now_s = core.clock.now_s()
            call.members = {m.node_id: m.is_live(now_s) for m in core.membership.all()}
        return call.members

    async def leave(self) -> None:
        """Ends the node's lease."""
        core = self._core
        with self._history.leave(self._node_id):
            await _whole(core.leave(self._node_id))

    async def close(self) -> None:
        """Does nothing: there is no connection."""


async def observe(
    coordinator: VirtualCoordinator, node_id: NodeId, others: Sequence[NodeId], rng: random.Random
) -> None:
    """Runs a client that watches heads, reads, and records versions in any order, at random times, until cancelled."""
    client, lineages = CoreClient(coordinator, node_id), [node_id, *others]
    owner = UnrulyOwner(node_id, rng)
    while True:
        try:
            async with asyncio.timeout(rng.uniform(0.5, 6.0)):
                async with aclosing(client.watch_versions(rng.choice(lineages))) as heads:  # type: ignore[type-var]
                    async for _ in heads:
                        await client.list_members()
                        if rng.random() < 0.3:
                            await asyncio.sleep(rng.uniform(0.0, 2.0))  # a slow reader skips to the newest
        except (TimeoutError, Unavailable):
            await asyncio.sleep(rng.uniform(0.1, 1.0))
        try:
            await client.record_versions(owner.versions())
            await client.read_head(rng.choice(lineages))
            await client.list_members()
        except Unavailable:
            continue


async def _whole(call: Coroutine[None, None, Result]) -> Result:
    """Awaits a call that runs to its end even if the caller is cancelled, as in the real service."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to take it
    return await asyncio.shield(task)
