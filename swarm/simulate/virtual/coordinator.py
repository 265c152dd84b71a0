"""Coordinator of a virtual swarm: the real core in process, which a fault plan can crash.

Invariant: what its store holds survives a crash, the rest does not; a client sees nothing but the calls of the seam.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from coordinator.core import CoordinatorCore
from coordinator.store import MemoryCoordinatorStore
from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.types import Advice, NodeReport, PolicyVersion


class VirtualCoordinator:
    """The coordinator's pure core; what its store holds survives a crash, the rest does not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._store = MemoryCoordinatorStore()
        self.core: CoordinatorCore | None = CoordinatorCore(clock, self._store)

    def crash(self) -> None:
        """It answers no call until `restart`; every watch ends."""
        if self.core is not None:
            self.core.watches.end()
        self.core = None

    async def restart(self) -> None:
        """A new core over the same store."""
        core = CoordinatorCore(self._clock, self._store)
        await core.restore()
        self.core = core


class CoreClient:
    """The coordinator as a node calls it, without a network; unavailable while it is down."""

    def __init__(self, coordinator: VirtualCoordinator, node_id: str) -> None:
        self._coordinator = coordinator
        self._node_id = node_id

    @property
    def _core(self) -> CoordinatorCore:
        if self._coordinator.core is None:
            raise Unavailable("the coordinator is down")
        return self._coordinator.core

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the lease."""
        return await self._core.heartbeat(self._node_id, report)

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Adds to the ledger."""
        await self._core.record_versions(self._node_id, versions)

    async def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        """Heads of a lineage."""
        async with aclosing(self._core.watch_versions(self._node_id, policy_id)) as heads:
            async for head in heads:
                yield head

    async def leave(self) -> None:
        """Ends the lease."""
        await self._core.leave(self._node_id)

    async def close(self) -> None:
        """Nothing to close."""
