"""Coordinator of a virtual swarm: the real core in process, which a fault plan can crash.

Invariant: what its store holds survives a crash, the rest does not; a client sees nothing but the calls of the seam,
and what it sees is in the history. A call that a crash met is carried out wholly or not at all, and its caller never
learns which.
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
    """A store whose writes take time, before they are on the disk and after."""

    def __init__(self, write_s: float, seed: str) -> None:
        super().__init__()
        self._write_s = write_s
        self._rng = random.Random(f"coordinator store {seed}")
        self.is_dead = False  # the core that writes here crashed

    def next_life(self) -> "SlowStore":
        """The same disk for the next core; whatever the last one still does reaches it no more."""
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
    """The coordinator's pure core; what its store holds survives a crash, the rest does not.

    Args:
        clock: of the coordinator.
        write_s: most that a write to its disk takes.
        core: a test puts a broken one here.
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
        """It answers no call until `restart`; every watch ends."""
        if self.core is not None:
            self.core.watches.end()
        self.core = None
        self._store = self._store.next_life()

    async def restart(self) -> None:
        """A new core over the same store."""
        core = self._make_core(self._clock, self._store)
        await core.restore()
        self.core = core


class CoreClient:
    """The coordinator as a node calls it, without a network; unavailable while it is down."""

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
        """Renews the lease."""
        core = self._core
        with self._history.heartbeat(self._node_id) as call:
            call.advice = advice = await _whole(core.heartbeat(self._node_id, report))
        return advice

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Adds to the ledger."""
        core = self._core
        with self._history.record(self._node_id, versions) as call:
            answers = await _whole(core.record_versions(self._node_id, versions))
            call.accepted = tuple(answer.accepted for answer in answers)

    async def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        """Heads of a lineage."""
        core = self._core
        with self._history.watch(policy_id) as watch:
            async with aclosing(core.watch_versions(self._node_id, policy_id)) as heads:
                async for head in heads:
                    with watch.seeing(head):
                        yield head

    async def read_head(self, policy_id: str) -> PolicyVersion | None:
        """The head of a lineage, as the status page shows it."""
        core = self._core
        with self._history.read_head(policy_id) as call:
            call.head = core.ledger.head(policy_id)
        return call.head

    async def list_members(self) -> dict[NodeId, bool]:
        """Members, and whether each one's lease runs."""
        core = self._core
        with self._history.list_members() as call:
            now_s = core.clock.now_s()
            call.members = {m.node_id: m.is_live(now_s) for m in core.membership.all()}
        return call.members

    async def leave(self) -> None:
        """Ends the lease."""
        core = self._core
        with self._history.leave(self._node_id):
            await _whole(core.leave(self._node_id))

    async def close(self) -> None:
        """Nothing to close."""


async def observe(
    coordinator: VirtualCoordinator, node_id: NodeId, others: Sequence[NodeId], rng: random.Random
) -> None:
    """A client that watches and reads, now and then, for ever, and hands in versions in every order."""
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
    """Carried out to its end also when the caller dies, as the service does."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to take it
    return await asyncio.shield(task)
