"""Version publisher of a trainer: signs the manifest bodies that its worker made, and serves them.

Invariant: no served version is newer than the one published last, and each served manifest is on the disk with all its
chunks before any other node learns of it. Chunks of a version that cannot be served are deleted at once; chunks that a
killed trainer left have no manifest and are deleted after GRACE_S.
"""

import logging
from collections.abc import Sequence

from swarm.events import VersionUnpublished
from swarm.node_context import NodeContext
from swarm.types import PolicyVersion, SealedManifest
from swarm.weight_sync.weight_server import WeightServer
from swarm.weights.manifest import Manifest, seal_body, with_branch
from swarm.weights.payload import Unusable
from swarm.weights.store import GRACE_S, WeightStore

logger = logging.getLogger(__name__)


class VersionPublisher:
    """The publishing side of a node's own lineage, in its agent."""

    def __init__(self, context: NodeContext, store: WeightStore, weight_server: WeightServer) -> None:
        self._identity = context.identity
        self._emit = context.emit
        self._offload = context.offload
        self._store = store
        self._weight_server = weight_server
        self._clock = context.clock
        self._branch = 0  # current branch; 0 before `restore`
        self._newest_step = -1  # signed in this branch

    async def restore(self) -> None:
        """Serves the versions that were published before a restart, and begins a new branch."""
        manifests = await self._weight_server.restore(self._identity.node_id)
        self._begin_branch(max((manifest.branch for manifest, _ in manifests), default=0))

    def _begin_branch(self, last: int) -> None:
        """Starts a branch, in which steps may be signed again with different weights."""
        self._branch, self._newest_step = max(last + 1, int(self._clock.now_s())), -1

    async def publish(self, version: PolicyVersion, bodies: Sequence[bytes]) -> None:
        """Makes a version the newest: versions beyond it, and other weights of its step, are no longer served.

        A manifest that cannot be served is logged and reported as an event; nothing is raised for it.

        Args:
            version: a version of our own lineage.
            bodies: bodies of the manifests that lead to the version; empty if its chunks found no room. The worker
                waits for this call and writes no chunk.
        """
        if version.step <= self._newest_step or not self._branch:
            self._begin_branch(self._branch)
        self._newest_step = version.step
        await self._abandon_beyond(version)
        is_served = bool(bodies)
        for body in bodies:
            error = await self._publish(version, body)
            if error:
                logger.error(
                    "a version could not be published; nobody can follow it",
                    extra={"step": version.step, "error": error},
                )
                self._emit(VersionUnpublished(step=version.step, error=error))
                is_served = False
        if not is_served:
            await self.tidy(grace_s=0.0)

    async def tidy(self, grace_s: float = GRACE_S) -> None:
        """Prunes the store (`WeightStore.prune`) and stops serving the versions that were deleted."""
        policy_id = self._identity.node_id
        # Read before the disk, so that a version published during the call is not withdrawn.
        before = self._weight_server.held(policy_id).keys()
        await self._offload(self._store.prune, {policy_id}, grace_s)
        kept = {sealed.digest for _, sealed in await self._offload(self._store.manifests, policy_id)}
        self._weight_server.withdraw(before - kept)

    async def _publish(self, version: PolicyVersion, body: bytes) -> str:
        """Signs, stores and serves one manifest of the version; returns the reason if that fails, else ""."""
        sealed: SealedManifest = await self._offload(seal_body, with_branch(body, self._branch), self._identity)
        manifest: Manifest | Unusable = await self._offload(self._store.open, sealed)
        if isinstance(manifest, Unusable):
            return f"{manifest.reason}: {manifest.detail}"
        if manifest.version != version:
            return f"a manifest of step {manifest.version.step} came with it"
        missing = await self._offload(self._store.missing, manifest.chunks)
        if missing:
            return f"{len(missing)} of {len(manifest.chunks)} chunks are not in the weight store"
        try:
            await self._offload(self._store.add_manifest, sealed)
        except OSError as error:  # StorageFull is one
            return str(error)
        self._weight_server.offer(manifest, sealed)
        return ""

    async def _abandon_beyond(self, version: PolicyVersion) -> None:
        head_step = self._weight_server.head_step(version.policy_id)
        if head_step is None or version.step > head_step:
            return  # the usual case
        manifests: list[tuple[Manifest, SealedManifest]] = await self._offload(self._store.manifests, version.policy_id)
        gone = [s.digest for m, s in manifests if m.version.step >= version.step and m.version != version]
        self._weight_server.withdraw(gone)
        await self._offload(self._store.drop_manifests, gone)
        if gone:
            extra = {"step": version.step, "manifests": len(gone)}
            logger.warning("resumed from an earlier step; later versions are no longer served", extra=extra)
