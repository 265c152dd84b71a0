"""Follower of a trainer: choice of the trainer, its known versions, missing chunks, and the version in the engine.

Invariant: the worker gets only manifests that the trainer signed and whose chunks are on the disk, and each version
that the engine refuses is reported. No task is started here: `swarm.loops.fetch_weights` watches and fetches.
"""

import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

from swarm.errors import StorageFull
from swarm.events import ApplyFailed, DiskFull, OwnerEquivocated, VersionApplied, digest_text
from swarm.interfaces import PeerClient
from swarm.node_context import NodeContext
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
from swarm.weight_sync.chunk_fetch import ChunkFetcher, ChunkSources
from swarm.weight_sync.credit import CreditBalance
from swarm.weight_sync.equivocation import EquivocationProof, EquivocationWitness, load_proof, save_proof
from swarm.weight_sync.update_planner import KnownPatches, News, UpdatePlanner
from swarm.weight_sync.weight_server import WeightServer
from swarm.weights.patch_graph import Patch
from swarm.weights.payload import Unusable, UnusableReason
from swarm.weights.store import WeightStore

logger = logging.getLogger(__name__)

GRACE_S: Final = 60.0  # of chunks without a manifest: here a chunk is fetched only after its manifest was stored


class FollowerState(StrEnum):
    """Progress of a follower.

    SEARCHING -> WATCHING: adverts show which trainer to follow (`on_adverts`).
    WATCHING -> READY: the engine applied a version of that trainer (`on_applied`).
    READY -> WATCHING: an engine that does not hold that version asks for an update (`next_update`).
    any -> ENDED: the trainer signed two versions of one step (`on_manifest`); it is no longer followed.
    """

    SEARCHING = "searching"  # no trainer is known
    WATCHING = "watching"  # its versions are fetched; the engine serves none of them
    READY = "ready"  # the engine serves one; groups may be made within the credit
    ENDED = "ended"  # the trainer is proven to equivocate


class WeightFollower:
    """Follows the trainer for which a node without its own trainer generates. One method for each input.

    Args:
        context: context of the node; its signal `changed` fires when the plan, the credit or a connection changed.
        store: manifests and chunks on the disk.
        weight_server: serves complete versions to other nodes.
        on_equivocation: called with the trainer's id once the trainer is proven to equivocate.
    """

    def __init__(
        self,
        context: NodeContext,
        store: WeightStore,
        weight_server: WeightServer,
        on_equivocation: Callable[[NodeId], None] = lambda owner: None,
    ) -> None:
        config, clock = context.config, context.clock
        self._clock = clock
        self._config = config
        self._node_id = context.node_id
        self._emit = context.emit
        self._offload = context.offload
        self._store = store
        self._weight_server = weight_server
        self._on_equivocation = on_equivocation
        self._choice = TrainerChoice(
            node_id=context.node_id, named=config.follow.policy, directory=config.dir, clock=clock
        )
        self._planner = UpdatePlanner(KnownPatches(config.follow.policy), store.max_bytes)  # empty while SEARCHING
        self._handed: tuple[Patch, ...] = ()  # the chain that the worker got last
        self._witness = EquivocationWitness()  # of the followed lineage
        self._newest_branch = 0  # signed by the trainer, whoever sent it
        self.state = FollowerState.SEARCHING
        self.head = self._no_version  # version in our advert: the one that the engine serves
        self.changed = context.changed
        self.credit = CreditBalance(config.generator.groups_per_batch)
        self.sources = ChunkSources(clock)
        self.fetcher = ChunkFetcher(
            sources=self.sources,
            origin=lambda: self.policy_id,
            queue=lambda: self._planner.queue,
            is_planned=lambda: self._is_listed,
            store_chunk=self.on_chunk,
            on_lacked=self.on_lacked,
            changed=context.changed,
            clock=clock,
        )
        self.known_head_step = 0  # newest step of the trainer by its advert or the coordinator's ledger
        self.bytes_fetched = 0  # of chunks, since the process started
        self.num_applied = 0
        self.num_apply_failed = 0
        self.last_error = ""  # reason of the engine's last refusal; empty after the next version that it took

    @property
    def policy_id(self) -> NodeId:
        """Id of the followed trainer; "" until it is known."""
        return self._planner.known.policy_id

    # --- inputs: directory and coordinator -----------------------------------------------------------

    async def on_adverts(self, adverts: Sequence[Advert]) -> None:
        """Chooses the trainer while SEARCHING, and records the head in the trainer's advert."""
        self._choice.observe(adverts)
        if self.state is FollowerState.SEARCHING:
            policy_id = await self._offload(self._choice.choose)
            if policy_id:
                planner = await self._restore(policy_id)
                if self._planner.is_held_known:
                    planner.set_held(self._planner.held)
                self._planner, self.state = planner, FollowerState.WATCHING
                proof = await self._offload(load_proof, self._config.dir, self._store)
                if proof is not None and proof.policy_id == policy_id:
                    self._end(proof)
                self.changed.fire()
        for advert in adverts:
            if advert.node_id == self.policy_id:
                self.on_head(advert.head)

    def on_head(self, head: PolicyVersion) -> None:
        """Records a newer step claimed for the trainer; the claim, though unproven, suffices to reconnect at once."""
        if head.policy_id == self.policy_id and head.step > self.known_head_step:
            self.known_head_step = head.step
            self.changed.fire()

    async def _restore(self, policy_id: NodeId) -> UpdatePlanner:
        """Builds the planner of a lineage from the manifests on the disk."""
        planner = UpdatePlanner(KnownPatches(policy_id), self._store.max_bytes)
        for manifest, sealed in await self._weight_server.restore(policy_id):
            self._witness.observe(manifest, sealed)
            patch = Patch(manifest=manifest, sealed=sealed)
            news, forgotten = planner.known.add(patch, is_from_owner=False)
            planner.set_missing(patch, await self._offload(self._store.missing, manifest.chunks))
            await self._drop([*forgotten, *([] if news is News.NEW else [patch])])
        logger.info("following a trainer", extra={"trainer": short(policy_id), "manifests": len(planner.known.patches)})
        return planner

    # --- inputs: watched sources ---------------------------------------------------------------------

    def on_connected(self, peer: NodeId, client: PeerClient) -> None:
        """Records a new connection to a source."""
        self.fetcher.clients[peer] = client
        self.sources.connect(peer, is_origin=peer == self.policy_id)
        if peer == self.policy_id:
            self.credit.reset()
        self._planner.mark_obtainable()
        self._planner.queue.rescan()
        self.changed.fire()

    def on_disconnected(self, peer: NodeId, client: PeerClient) -> None:
        """Records the end of a connection to a source."""
        if self.fetcher.clients.get(peer) is not client:
            return  # a newer one, perhaps through another relay, took its place
        del self.fetcher.clients[peer]
        self.sources.disconnect(peer)
        if peer == self.policy_id:
            self.credit.reset()
        self.changed.fire()

    async def on_manifest(self, peer: NodeId, sealed: SealedManifest) -> News | Unusable:
        """Handles a manifest that a source serves.

        Once the trainer has sent credit on its connection, only manifests from the trainer add versions; those from
        other sources only show the chunks that a source holds.

        Returns:
            The effect on the known versions, or the reason why the manifest is unusable.
        """
        planner = self._planner
        known = planner.known.get(sealed.digest)
        manifest = known.manifest if known is not None else await self._offload(self._store.open, sealed)
        if isinstance(manifest, Unusable):
            return manifest
        if manifest.version.policy_id != self.policy_id:
            detail = f"lineage {short(manifest.version.policy_id)}, watched {short(self.policy_id)}"
            return Unusable(reason=UnusableReason.WRONG_OWNER, detail=detail)
        if known is None and not manifest.branch:
            return News.TOO_OLD  # signed by release 0.1.0, so a contradiction would prove nothing
        proof = self._witness.observe(manifest, sealed)
        if proof is not None and self.state is not FollowerState.ENDED:
            await self._offload(save_proof, self._config.dir, proof)
            self._end(proof)
        if self.state is FollowerState.ENDED:
            return News.CONFLICT
        if known is None and manifest.branch < self._newest_branch:
            # prevents a trainer from leading us along a branch that it hides from others
            extra = {"step": manifest.version.step, "branch": manifest.branch, "newest": self._newest_branch}
            logger.debug("a manifest of an older branch is not followed", extra=extra)
            if peer == self.policy_id and manifest.version.step > self.known_head_step:
                self.last_error = "the trainer continues an older branch than it showed others; it is not followed"
            return News.TOO_OLD
        self._newest_branch = max(self._newest_branch, manifest.branch)
        self.sources.add_held(peer, manifest.chunks)
        planner.mark_obtainable(manifest.chunks)
        planner.queue.rescan()
        news, forgotten = News.KNOWN, list[Patch]()
        patch = Patch(manifest=manifest, sealed=sealed)
        is_from_owner = peer == self.policy_id
        if is_from_owner or self.credit.head_step is None:
            news, forgotten = planner.known.add(patch, is_from_owner=is_from_owner)
        await self._drop(forgotten)
        if news is News.NEW:
            await self._keep(patch)
        if forgotten or news is News.NEW:
            planner.replan()
        self.changed.fire()
        return news

    def _end(self, proof: EquivocationProof) -> None:
        """Stops following the trainer, and serves the proof against it to other nodes."""
        name = short(proof.policy_id)
        self.last_error = f"trainer {name} signed two versions of step {proof.step}; name another in follow.policy"
        logger.error(self.last_error)
        self.state, self.head = FollowerState.ENDED, self._no_version
        self.credit.reset()
        self._weight_server.prove(proof)
        self._on_equivocation(proof.policy_id)
        first, second = (digest_text(each.digest) for each in proof.manifests)
        self._emit(OwnerEquivocated(policy_id=proof.policy_id, step=proof.step, first=first, second=second))
        self.changed.fire()

    def is_suspect(self, head: PolicyVersion) -> bool:
        """True if another node names weights for a step that contradict the manifests seen here."""
        return head.policy_id == self.policy_id and self._witness.contradicts(head.step, head.digest)

    async def on_credit(self, peer: NodeId, credit: Credit) -> None:
        """Applies the trainer's credit and drops versions newer than its head; credit of any other peer is ignored."""
        if peer != self.policy_id or self.state is FollowerState.ENDED:
            return
        self.credit.update(credit, self._clock.now_s())
        abandoned = self._planner.known.rewind(credit.head_step)
        if abandoned:
            extra = {"step": credit.head_step, "manifests": len(abandoned)}
            logger.warning("the trainer resumed from an earlier step; its newer versions are dropped", extra=extra)
            self.known_head_step = credit.head_step
            await self._drop(abandoned)
            self._planner.replan()
        self.changed.fire()

    async def _keep(self, patch: Patch) -> None:
        """Stores a manifest before its chunks are fetched, so that a restart continues from here."""
        try:
            await self._offload(self._store.add_manifest, patch.sealed)
        except StorageFull as error:
            self._report_full(error)  # it stays known, and `tidy` writes it when there is room
        await self._offload(self._choice.remember, self.policy_id)
        await self._check_disk([patch])

    async def _drop(self, patches: Sequence[Patch]) -> None:
        if patches:
            digests = [patch.digest for patch in patches]
            self._weight_server.withdraw(digests)
            await self._offload(self._store.drop_manifests, digests)

    # --- inputs: chunks, and the disk ------------------------------------------------------------------

    async def on_chunk(self, digest: Digest, data: bytes) -> None:
        """Stores a chunk and serves the patches that it completes. Raises ValueError for a wrong chunk, StorageFull."""
        try:
            await self._offload(self._store.put_chunk, digest, data)
        except StorageFull as error:
            self._report_full(error)
            raise
        self.bytes_fetched += len(data)
        for patch in self._planner.add_chunk(digest):
            self._weight_server.offer(patch.manifest, patch.sealed)

    def on_lacked(self, digest: Digest) -> None:
        """Plans another chain if the trainer is connected and no connected source can have this chunk."""
        if not self.sources.is_obtainable(digest) and self.policy_id in self.sources.connected:
            self._planner.mark_unobtainable(digest)

    async def tidy(self) -> None:
        """Prunes the weight store, writes manifests that it had no room for, and checks the stored versions."""
        if self.state in (FollowerState.SEARCHING, FollowerState.ENDED):
            return
        known = self._planner.known
        before = await self._stored_digests()
        await self._offload(self._store.prune, {self.policy_id}, GRACE_S)
        kept = await self._stored_digests()
        known.forget(before - kept)  # known manifests that are still to be written stay
        self._weight_server.withdraw(before - kept)
        for patch in [patch for patch in known.patches if patch.digest not in kept]:
            # There was no room for it at first; without it `prune` would delete its chunks after a while.
            try:
                await self._offload(self._store.add_manifest, patch.sealed)
            except StorageFull:
                break  # reported when the manifest came
            if patch.digest not in known:  # forgotten while it was written
                await self._drop([patch])
        self.sources.keep_only({chunk for patch in known.patches for chunk in patch.manifest.chunks})
        await self._check_whole_disk()

    async def _stored_digests(self) -> set[Digest]:
        return {sealed.digest for _, sealed in await self._offload(self._store.manifests, self.policy_id)}

    async def _check_whole_disk(self) -> None:
        """Checks all known versions on the disk and plans again, after a damaged chunk was dropped or room was made."""
        await self._check_disk(list(self._planner.known.patches))
        self._planner.replan()
        self.changed.fire()

    async def _check_disk(self, patches: Sequence[Patch]) -> None:
        """Serves the patches that are complete on the disk, and withdraws the others."""
        for patch in patches:
            if self._planner.set_missing(patch, await self._offload(self._store.missing, patch.manifest.chunks)):
                self._weight_server.offer(patch.manifest, patch.sealed)
            else:
                self._weight_server.withdraw([patch.digest])

    # --- inputs: our own worker ------------------------------------------------------------------------

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        """The manifests that lead from the engine's version to the newest version that is complete on the disk.

        Args:
            held: version in the engine; None: nothing of the followed lineage.
            wait: True: waits until there are such manifests. Otherwise returns None if there are none.
        """
        if self.state is FollowerState.READY and held != self.head:  # a new engine, which does not serve the head
            self.state, self.head = FollowerState.WATCHING, self._no_version
        if self._planner.set_held(held):
            self.changed.fire()  # there may be something to fetch
        if wait:
            await self.changed.until(lambda: bool(self._ready_patches()))
        self._handed = self._ready_patches()
        return tuple(patch.sealed for patch in self._handed) or None

    async def on_applied(self, report: ApplyReport) -> None:
        """Records the engine's report on the version that `next_update` returned last."""
        assert self.state is not FollowerState.SEARCHING, "nothing was handed out: no trainer is followed yet"
        target = self._handed[-1].version if self._handed else report.version
        if report.error:
            await self._on_refused(target, report)
            return
        self.num_applied += 1
        self.last_error = ""
        if self.state is not FollowerState.ENDED:
            self.state, self.head = FollowerState.READY, report.version
        await self._check_disk([patch for patch in self._planner.known.patches if patch.version == report.version])
        self._planner.record_applied(report.version)
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

    async def _on_refused(self, target: PolicyVersion, report: ApplyReport) -> None:
        self.num_apply_failed += 1
        self.last_error = f"step {target.step}: {report.error}"
        await self._check_whole_disk()
        attempt = 0  # not counted after damage on the disk
        if self._planner.are_complete(self._handed):
            attempt = self._planner.record_refusal(target, is_unusable=report.is_unusable)
            self._planner.replan()
        extra = {"step": target.step, "error": report.error, "attempt": attempt}
        logger.error("the engine refused a version; it keeps serving the previous one", extra=extra)
        digest = digest_text(target.digest)
        self._emit(ApplyFailed(policy_id=target.policy_id, step=target.step, digest=digest, error=report.error))
        self.changed.fire()

    def capacity(self) -> int:
        """Number of groups that may be started now: the credit left while READY, else 0.

        In `pull` mode also 0 until the newest version is here, since each batch starts with it.
        """
        if self.state is not FollowerState.READY:
            return 0
        if self._config.follow.mode == "pull":
            newest = self._planner.known.head
            if newest is None or newest.step < (self.credit.head_step or 0) or not self._planner.is_ready:
                return 0
        return self.credit.num_left

    # --- status ------------------------------------------------------------------------------------------

    def status(self) -> JsonDict:
        """Figures of the follower for `swarm status`."""
        newest = self._planner.known.head
        return {
            "policy": self.policy_id,
            "state": str(self.state),
            "candidates": list(self._choice.candidates),
            "trainers_without_weights": list(self._choice.without_weights),
            "is_trainer_connected": bool(self.policy_id) and self.policy_id in self.sources.connected,
            "served_step": self.head.step if self.state is FollowerState.READY else None,
            "newest_step": None if newest is None else newest.step,
            "head_step": max(self.known_head_step, 0 if newest is None else newest.step),
            "sources": self.sources.status(),
            "bytes_fetched": self.bytes_fetched,
            "bytes_held": self._store.bytes_held,
            "credit": self.credit.num_left,
            "num_applied": self.num_applied,
            "num_apply_failed": self.num_apply_failed,
            "last_error": self.last_error,
        }

    # --- inside --------------------------------------------------------------------------------------------

    @property
    def _no_version(self) -> PolicyVersion:
        return PolicyVersion(policy_id=self._node_id, step=0)

    @property
    def _is_listed(self) -> bool:
        """True once the trainer has listed all versions (the best patch may come last), or while it is disconnected."""
        return self.credit.head_step is not None or self.policy_id not in self.sources.connected

    def _ready_patches(self) -> tuple[Patch, ...]:
        return self._planner.ready() if self._is_listed and self.state is not FollowerState.ENDED else ()

    def _report_full(self, error: StorageFull) -> None:
        logger.error("the weight store is full; the engine keeps serving what it has", extra={"error": str(error)})
        self._emit(DiskFull(error=str(error)))
