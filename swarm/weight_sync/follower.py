"""Following a lineage: whom, what its versions are, what is missing on the way to the newest, what the engine took.

Invariant: the worker gets only manifests that the owner of the lineage signed and whose chunks lie on the disk, and
every version that the engine did not take is told. No task lives here: `swarm.loops.fetch_weights` watches and fetches.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import StorageFull
from swarm.events import ApplyFailed, DiskFull, Emit, VersionApplied, digest_text
from swarm.flow import Signal
from swarm.interfaces import Offload
from swarm.types import (
    Advert,
    ApplyReport,
    Credit,
    Digest,
    JsonDict,
    NodeId,
    PatchChain,
    PolicyVersion,
    SealedManifest,
    short,
)
from swarm.weight_sync.choose_trainer import TrainerChoice
from swarm.weight_sync.chunk_sources import ChunkSources
from swarm.weight_sync.credit import CreditBalance
from swarm.weight_sync.update_planner import KnownPatches, News, UpdatePlanner
from swarm.weight_sync.weight_server import WeightServer
from swarm.weights.patch_graph import Patch
from swarm.weights.store import WeightStore
from swarm.weights.unusable import Unusable, UnusableReason

logger = logging.getLogger(__name__)

GRACE_S: Final = 60.0  # for chunks that no manifest names: here each one is named before it is fetched


class WeightFollower:
    """What a node without a trainer of its own knows of the lineage that it generates with.

    Args:
        config: of the node.
        node_id: our own.
        store: where chunks and manifests are kept.
        weight_server: what has come in whole is served to others.
        changed: fires when the plan, the leave or a connection changed.
        emit: takes events.
        clock: of the holders' rates, and of adverts.
        offload: for the disk.

    Example:
        await following.hear(await directory.lookup())
        await following.take(peer, sealed)
        way = await following.next_update(held, wait=True)
    """

    def __init__(
        self,
        *,
        config: NodeConfig,
        node_id: NodeId,
        store: WeightStore,
        weight_server: WeightServer,
        changed: Signal,
        emit: Emit,
        clock: Clock,
        offload: Offload,
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._store = store
        self._weight_server = weight_server
        self._emit = emit
        self._offload = offload
        self._trainers = TrainerChoice(node_id=node_id, named=config.follow.policy, directory=config.dir, clock=clock)
        self._ways: UpdatePlanner | None = None  # None until it is known whom to follow
        self._asked: list[PolicyVersion | None] = []  # what the engine holds, once the worker said it
        self._handed: tuple[Patch, ...] = ()  # the way that was handed out last
        self._fetching: set[Digest] = set()
        self.changed = changed
        self.holders = ChunkSources(clock)
        self.credit = CreditBalance()
        self.served: PolicyVersion | None = None  # what the engine took
        self.known_head_step = 0  # newest step that the trainer's advert or the ledger told of
        self.bytes_fetched = 0  # chunks, since the process started
        self.num_applied = 0
        self.num_apply_failed = 0
        self.last_error = ""  # why the engine did not take a version; empty after the next one that it took

    # --- whom to follow ----------------------------------------------------------------------------

    @property
    def policy_id(self) -> NodeId:
        """The trainer whose lineage is followed; empty until it is known."""
        return self._ways.known.policy_id if self._ways is not None else self._config.follow.policy

    @property
    def is_found(self) -> bool:
        """Whether it is known whom to follow."""
        return self._ways is not None

    async def hear(self, adverts: Sequence[Advert]) -> None:
        """Looks for the trainer, where none is known, and for news of its head."""
        self._trainers.observe(adverts)
        if self._ways is None:
            policy_id = await self._offload(self._trainers.choose)
            if policy_id:
                ways = await self._resume(policy_id)
                for held in self._asked:
                    ways.set_held(held)
                self._ways = ways
                self.changed.fire()
        for advert in adverts:
            if advert.node_id == self.policy_id:
                self.note_head(advert.head)

    async def _resume(self, policy_id: NodeId) -> UpdatePlanner:
        """What the disk has of the lineage, after a restart."""
        ways = UpdatePlanner(KnownPatches(policy_id), self._store.max_bytes)
        for manifest, sealed in await self._weight_server.restore(policy_id):
            patch = Patch(manifest=manifest, sealed=sealed)
            heard, gone = ways.known.add(patch, is_from_owner=False)
            ways.set_missing(patch, await self._offload(self._store.missing, manifest.chunks))
            await self._drop([*gone, *([] if heard is News.NEW else [patch])])
        logger.info("following a trainer", extra={"trainer": short(policy_id), "manifests": len(ways.known.patches)})
        return ways

    def note_head(self, head: PolicyVersion) -> None:
        """The lineage has come so far: no proof, but worth connecting again at once."""
        if head.policy_id == self.policy_id and head.step > self.known_head_step:
            self.known_head_step = head.step
            self.changed.fire()

    # --- told by the watches -------------------------------------------------------------------------

    def connected(self, peer: NodeId) -> None:
        """A watch of a peer began."""
        self.holders.connect(peer, is_origin=peer == self.policy_id)
        if peer == self.policy_id:
            self.credit.reset()
        if self._ways is not None:
            self._ways.mark_obtainable()
            self._ways.queue.rescan()
        self.changed.fire()

    def disconnected(self, peer: NodeId) -> None:
        """It ended."""
        self.holders.disconnect(peer)
        if peer == self.policy_id:
            self.credit.reset()
        self.changed.fire()

    async def take(self, peer: NodeId, sealed: SealedManifest) -> News | Unusable:
        """A manifest came on the watch of a peer.

        While the trainer itself is connected, only its own word adds versions; of others it counts what they hold.
        """
        ways = self._require()
        known = ways.known.get(sealed.digest)
        manifest = known.manifest if known is not None else await self._offload(self._store.open, sealed)
        if isinstance(manifest, Unusable):
            return manifest
        if manifest.version.policy_id != ways.known.policy_id:
            detail = f"lineage {short(manifest.version.policy_id)}, watched {short(ways.known.policy_id)}"
            return Unusable(reason=UnusableReason.WRONG_OWNER, detail=detail)
        self.holders.announced(peer, manifest.chunks)
        ways.mark_obtainable(manifest.chunks)
        ways.queue.rescan()
        is_from_owner = peer == ways.known.policy_id
        heard, gone = News.KNOWN, list[Patch]()
        patch = Patch(manifest=manifest, sealed=sealed)
        if is_from_owner or self.credit.head_step is None:
            heard, gone = ways.known.add(patch, is_from_owner=is_from_owner)
        await self._drop(gone)
        if heard is News.NEW:
            await self._keep(ways, patch)
        if gone or heard is News.NEW:
            ways.replan()
        self.changed.fire()
        return heard

    async def take_credit(self, peer: NodeId, credit: Credit) -> None:
        """The trainer gives leave, and says where its head is: what is known beyond that is no more."""
        ways = self._require()
        if peer != ways.known.policy_id:
            return
        self.credit.update(credit)
        gone = ways.known.rewind(credit.head_step)
        if gone:
            logger.warning("the trainer went back", extra={"step": credit.head_step, "manifests": len(gone)})
            self.known_head_step = credit.head_step
            await self._drop(gone)
            ways.replan()
        self.changed.fire()

    async def _keep(self, ways: UpdatePlanner, patch: Patch) -> None:
        """On the disk before anything is fetched for it, so that a restart goes on where this process ended."""
        try:
            await self._offload(self._store.add_manifest, patch.sealed)
        except StorageFull as error:
            self._storage_full(error)  # known all the same, and written when there is room
        await self._offload(self._trainers.remember, ways.known.policy_id)
        if ways.set_missing(patch, await self._offload(self._store.missing, patch.manifest.chunks)):
            self._weight_server.offer(patch.manifest, patch.sealed)

    async def _drop(self, gone: Sequence[Patch]) -> None:
        if gone:
            digests = [patch.digest for patch in gone]
            self._weight_server.withdraw(digests)
            await self._offload(self._store.drop_manifests, digests)

    # --- told by the fetchers --------------------------------------------------------------------------

    def next_chunk(self) -> tuple[Digest, NodeId] | None:
        """A chunk to be fetched now, and whom to ask."""
        if self._ways is None or not self._is_told:
            return None
        queue, first = self._ways.queue, dict[int, NodeId]()
        for peer in self.holders.free:  # of those that can give the chunk that is needed first, the best
            at = queue.first(peer, partial(self._is_for, peer))
            if at is not None:
                first.setdefault(at, peer)
        return (queue[min(first)], first[min(first)]) if first else None

    def _is_for(self, peer: NodeId, digest: Digest) -> bool:
        return digest not in self._fetching and self.holders.can_have(peer, digest)

    def fetching(self, digest: Digest) -> None:
        """It is on its way."""
        self._fetching.add(digest)

    def fetched(self, digest: Digest) -> None:
        """It is not on its way any more, whether it came or not."""
        self._fetching.discard(digest)
        if self._ways is not None and digest in self._ways.queue:
            self._ways.queue.rescan()
        self.changed.fire()

    async def put_chunk(self, digest: Digest, data: bytes) -> None:
        """A chunk came. Raises ValueError for what is not that chunk, StorageFull."""
        try:
            await self._offload(self._store.put_chunk, digest, data)
        except StorageFull as error:
            self._storage_full(error)
            raise
        self.bytes_fetched += len(data)
        for patch in self._require().add_chunk(digest):
            self._weight_server.offer(patch.manifest, patch.sealed)

    def lacked(self, digest: Digest) -> None:
        """A holder lacks it; where nobody connected can have it, another way is looked for."""
        if not self.holders.can_be_had(digest) and self.policy_id in self.holders.connected:
            self._require().mark_unobtainable(digest)

    async def tidy(self) -> None:
        """Makes room on the disk, and looks what is there."""
        if self._ways is None:
            return
        lineage = self._ways.known
        before = await self._on_disk(lineage)
        await self._offload(self._store.prune, {lineage.policy_id}, GRACE_S)
        kept = await self._on_disk(lineage)
        lineage.forget(before - kept)  # not what is known and still to be written
        self._weight_server.withdraw(before - kept)
        await self._write_down([patch for patch in lineage.patches if patch.digest not in kept])
        self.holders.keep_only({chunk for patch in lineage.patches for chunk in patch.manifest.chunks})
        await self._look_again(self._ways)

    async def _on_disk(self, lineage: KnownPatches) -> set[Digest]:
        return {sealed.digest for _, sealed in await self._offload(self._store.manifests, lineage.policy_id)}

    async def _write_down(self, patches: Sequence[Patch]) -> None:
        """Manifests for which there was no room: chunks that no manifest names would be deleted after a while."""
        for patch in patches:
            try:
                await self._offload(self._store.add_manifest, patch.sealed)
            except StorageFull:
                return  # told when the manifest came
            if patch.digest not in self._require().known:  # gone meanwhile
                await self._drop([patch])

    async def _look_again(self, ways: UpdatePlanner) -> None:
        """What is on the disk may have changed under us: a damaged chunk was dropped, or room was made."""
        await self._look_at(ways, list(ways.known.patches))
        ways.replan()
        self.changed.fire()

    async def _look_at(self, ways: UpdatePlanner, patches: Sequence[Patch]) -> None:
        for patch in patches:
            if ways.set_missing(patch, await self._offload(self._store.missing, patch.manifest.chunks)):
                self._weight_server.offer(patch.manifest, patch.sealed)
            else:
                self._weight_server.withdraw([patch.digest])

    # --- own worker --------------------------------------------------------------------------------------

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        """The manifests that lead from what the engine holds as far as the disk goes."""
        if held != self.served:
            self.served = None  # another engine than the one that took it
        self._asked = [held]
        if self._ways is not None and self._ways.set_held(held):
            self.changed.fire()  # there may be something to fetch
        if wait:
            await self.changed.until(lambda: bool(self._ready()))
        self._handed = self._ready()
        return tuple(patch.sealed for patch in self._handed) or None

    async def applied(self, report: ApplyReport) -> None:
        """The engine took the version of the way that was handed out last, or it did not."""
        ways = self._require()
        target = self._handed[-1].version if self._handed else report.version
        if report.error:
            await self._apply_failed(ways, target, report)
            return
        self.num_applied += 1
        self.last_error = ""
        self.served, self._asked = report.version, [report.version]
        await self._look_at(ways, [patch for patch in ways.known.patches if patch.version == report.version])
        ways.record_applied(report.version)
        self._emit(
            VersionApplied(
                policy_id=target.policy_id,
                step=target.step,
                digest=digest_text(target.digest),
                num_bytes=report.num_bytes,
                seconds=report.seconds,
                mismatch_nats=report.mismatch_nats,
            )
        )
        self.changed.fire()
        if self._store.bytes_held > self._config.weights.store_bytes:
            await self.tidy()

    async def _apply_failed(self, ways: UpdatePlanner, target: PolicyVersion, report: ApplyReport) -> None:
        self.num_apply_failed += 1
        self.last_error = f"step {target.step}: {report.error}"
        await self._look_again(ways)
        attempt = 0  # unless it was whole: else something was damaged on the disk
        if ways.are_complete(self._handed):
            attempt = ways.record_refusal(target, is_unusable=report.is_unusable)
            ways.replan()
        extra = {"step": target.step, "error": report.error, "attempt": attempt}
        logger.error("the engine did not take a version; it serves the one before on", extra=extra)
        digest = digest_text(target.digest)
        self._emit(ApplyFailed(policy_id=target.policy_id, step=target.step, digest=digest, error=report.error))
        self.changed.fire()

    def capacity(self) -> int:
        """Groups that may be begun now; 0 while the trainer is away or the engine serves no version of it.

        In `pull` mode also 0 until the newest version is at hand: each batch begins with it.
        """
        if self.served is None or self._ways is None:
            return 0
        if self._config.follow.mode == "pull" and not self._has_newest_at_hand(self._ways):
            return 0
        return self.credit.num_left

    def _has_newest_at_hand(self, ways: UpdatePlanner) -> bool:
        newest = ways.known.head
        return newest is not None and newest.step >= (self.credit.head_step or 0) and ways.is_ready

    @property
    def head(self) -> PolicyVersion:
        """What the advert says: the version that the engine serves."""
        return self.served or PolicyVersion(policy_id=self._node_id, step=0)

    # --- what people see -----------------------------------------------------------------------------------

    def status(self) -> JsonDict:
        """For `swarm status`."""
        newest = None if self._ways is None else self._ways.known.head
        return {
            "policy": self.policy_id,
            "candidates": list(self._trainers.candidates),
            "trainers_without_weights": list(self._trainers.without_weights),
            "is_trainer_connected": bool(self.policy_id) and self.policy_id in self.holders.connected,
            "served_step": None if self.served is None else self.served.step,
            "newest_step": None if newest is None else newest.step,
            "head_step": max(self.known_head_step, 0 if newest is None else newest.step),
            "holders": self.holders.status(),
            "bytes_fetched": self.bytes_fetched,
            "bytes_held": self._store.bytes_held,
            "credit": self.credit.num_left,
            "num_applied": self.num_applied,
            "num_apply_failed": self.num_apply_failed,
            "last_error": self.last_error,
        }

    # --- inside --------------------------------------------------------------------------------------------

    @property
    def _is_told(self) -> bool:
        """False while the trainer still lists what it holds, oldest first: the best way may come last."""
        return self.credit.head_step is not None or self.policy_id not in self.holders.connected

    def _ready(self) -> tuple[Patch, ...]:
        return self._ways.ready() if self._ways is not None and self._is_told else ()

    def _require(self) -> UpdatePlanner:
        assert self._ways is not None, "nobody is watched, fetched from or applied before the trainer is known"
        return self._ways

    def _storage_full(self, error: StorageFull) -> None:
        logger.error("the weight store is full; the engine serves what it has on", extra={"error": str(error)})
        self._emit(DiskFull(error=str(error)))
