"""Update planner: the cheapest patch chain from the engine's version to the newest available one, with missing chunks.

Invariant: a step has one version, and the plan is the cheapest chain by the patches and chunks known now. Chunks on the
disk cost next to nothing, so a newer version changes the plan without discarding fetched chunks. Only the trainer
itself may replace a known version. Pure bookkeeping.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Final

from swarm.types import Digest, NodeId, PolicyVersion
from swarm.version_history import VersionHistory, VersionStatus
from swarm.weights.patch_graph import Cost, Patch, PatchGraph

MAX_BYTES: Final = 64 * 2**20  # of manifest bodies; the oldest versions are forgotten first
MAX_MANIFESTS: Final = 4096
MAX_REFUSALS: Final = 2  # attempts of an engine at one version
_DECODE_SHARE: Final = 64  # bytes whose decoding costs as much as fetching one: docs/measurements/weights.md
_UNKNOWN: Final = frozenset({b""})  # missing chunks of a manifest before the disk was looked at


class News(StrEnum):
    """Effect of a manifest on the known patches."""

    NEW = "new"
    KNOWN = "known"
    CONFLICT = "conflict"  # other weights for a known step, not from the trainer itself
    TOO_OLD = "too_old"  # older than the kept versions, of an older branch, or without a branch


class KnownPatches:
    """The known patches of one trainer, all of the branch in force.

    A trainer that resumes from a checkpoint starts a new branch, and the patches that it sends itself replace known
    versions from the first differing step on. Patches from other nodes never replace any, so a relay that replays old
    but genuine manifests cannot move us back.
    """

    def __init__(self, policy_id: NodeId) -> None:
        self.policy_id = policy_id
        self._patches: dict[Digest, Patch] = {}  # by digest of the manifest, in order of arrival
        self._history = VersionHistory(MAX_MANIFESTS + 1)  # targets of the known patches
        self._num_bytes = 0

    def add(self, patch: Patch, *, is_from_owner: bool) -> tuple[News, list[Patch]]:
        """Adds a patch of this trainer; returns its effect, and the patches forgotten (abandoned or too old)."""
        assert patch.version.policy_id == self.policy_id
        if patch.digest in self._patches:
            return News.KNOWN, []
        versions = [patch.version] if patch.base is None else [patch.base, patch.version]
        conflicts = [version.step for version in versions if self._history.at(version.step) not in (None, version)]
        if conflicts and not is_from_owner:
            return News.CONFLICT, []
        forgotten = self.rewind(min(conflicts) - 1) if conflicts else []
        self._patches[patch.digest] = patch
        self._history.record(patch.version)
        self._num_bytes += len(patch.sealed.body)
        while (len(self._patches) > MAX_MANIFESTS or self._num_bytes > MAX_BYTES) and len(self._history) > 1:
            oldest = self._history.after(-1, limit=1)[0].step
            forgotten += self._remove([each for each in self._patches.values() if each.version.step == oldest])
        return (News.NEW if patch.digest in self._patches else News.TOO_OLD), forgotten

    def rewind(self, head_step: int) -> list[Patch]:
        """Forgets the patches of versions beyond the trainer's head, and returns them."""
        self._history.rewind(head_step)
        return self._remove([patch for patch in self._patches.values() if patch.version.step > head_step])

    def forget(self, digests: Collection[Digest]) -> None:
        """Forgets manifests that the store dropped."""
        self._remove([patch for digest, patch in self._patches.items() if digest in digests])

    def _remove(self, patches: list[Patch]) -> list[Patch]:
        for patch in patches:
            del self._patches[patch.digest]
            self._num_bytes -= len(patch.sealed.body)
        for step in {patch.version.step for patch in patches} - {each.version.step for each in self._patches.values()}:
            self._history.forget(step)
        return patches

    def get(self, digest: Digest) -> Patch | None:
        """The known patch with this digest of its manifest, or None."""
        return self._patches.get(digest)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._patches

    @property
    def patches(self) -> Collection[Patch]:
        """All known patches, in order of arrival."""
        return self._patches.values()

    @property
    def head(self) -> PolicyVersion | None:
        """The newest known version, or None."""
        return self._history.head

    def chains(self, held: PolicyVersion | None, cost: Cost) -> Iterator[tuple[Patch, ...]]:
        """The cheapest chain to each newer version that can be reached, newest version first.

        Args:
            held: version in the engine; equal digests are the same weights under any name.
            cost: returns the cost of a patch; None excludes the patch.
        """
        graph = PatchGraph(self._patches.values(), cost, None if held is None else held.digest)
        for target in reversed(self._history.after(self._floor(held))):
            if (
                held is not None and held.digest == target.digest
            ):  # a new name for held weights: any patch to it will do
                yield next((patch,) for patch in self._patches.values() if patch.version == target)
                continue
            chain = graph.cheapest_to(target.digest)
            if chain is not None:
                yield self._under_its_name(chain, target, graph, cost)

    def _under_its_name(
        self, chain: tuple[Patch, ...], target: PolicyVersion, graph: PatchGraph, cost: Cost
    ) -> tuple[Patch, ...]:
        """The cheapest chain whose last patch names the target version; the given chain if there is none.

        Where a trainer returned to earlier weights, the cheapest chain to them may end with their earlier name.
        """
        if not chain or chain[-1].version == target:
            return chain
        found: list[tuple[int, tuple[Patch, ...]]] = []
        for patch in self._patches.values():
            before = () if patch.base is None else graph.cheapest_to(patch.base.digest)
            costs = [cost(each) for each in (*(before or ()), patch)]
            if patch.version == target and before is not None and None not in costs:
                found.append((sum(filter(None, costs)), (*before, patch)))
        return min(found, key=lambda each: each[0])[1] if found else chain

    def is_behind(self, step: int, held: PolicyVersion | None) -> bool:
        """True if a step is at most the step of the engine's version, and that version is of the branch in force."""
        return step <= self._floor(held)

    def _floor(self, held: PolicyVersion | None) -> int:
        """The step that the engine has to move beyond; -1 if it may move to any step.

        -1 if the engine holds no version of this trainer, if the trainer went back, or if the held version is of an
        abandoned branch; not if the held version is merely forgotten here.
        """
        if held is None or held.policy_id != self.policy_id:
            return -1
        is_in_force = self._history.status(held) in (VersionStatus.CURRENT, VersionStatus.FORGOTTEN)
        return held.step if is_in_force else -1


class ChunkQueue:
    """The missing chunks of one plan, in the order of use, with a reading position for each source.

    Invariant: chunks before a source's position are here, under way, or not available from it. So each chunk is looked
    at once per source while nothing fails.
    """

    def __init__(self, chunks: Iterable[Digest]) -> None:
        self._missing = dict.fromkeys(chunks)
        self._chunks = tuple(self._missing)
        self._positions: dict[NodeId, int] = {}

    def __getitem__(self, at: int) -> Digest:
        return self._chunks[at]

    def __contains__(self, chunk: Digest) -> bool:
        return chunk in self._missing

    def first(self, peer: NodeId, is_for: Callable[[Digest], bool]) -> int | None:
        """Position of the first missing chunk to request from a source, or None."""
        at = self._positions.get(peer, 0)
        while at < len(self._chunks) and not (self._chunks[at] in self._missing and is_for(self._chunks[at])):
            at += 1
        self._positions[peer] = at
        return at if at < len(self._chunks) else None

    def remove(self, chunk: Digest) -> None:
        """Drops a chunk that has arrived."""
        self._missing.pop(chunk, None)

    def rescan(self) -> None:
        """Resets all positions: a source has more chunks now, or a chunk under way did not arrive."""
        self._positions.clear()


class UpdatePlanner:
    """The plan for one engine that follows a trainer.

    Args:
        known: known patches of the trainer.
        max_bytes: bound of all payloads of one chain, on the disk or not; if the newest version needs more, an older
            one is planned first.
    """

    def __init__(self, known: KnownPatches, max_bytes: int) -> None:
        self.known = known
        self._max_bytes = max_bytes
        self.plan: tuple[Patch, ...] = ()  # empty: no newer version can be reached
        self.held: PolicyVersion | None = None  # version in the engine
        self.is_held_known = False  # nothing is planned until the worker reports what the engine holds
        self._missing: dict[Digest, set[Digest]] = {}  # manifest -> its chunks that are not on the disk
        self._unobtainable: set[Digest] = set()  # chunks that no connected source has
        self._refusals: Counter[Digest] = Counter()  # by weights that the engine did not take
        self._unusable: set[Digest] = set()  # weights that the fetched chunks do not give
        self._queue: ChunkQueue | None = None  # of the plan; None until it is needed

    # --- inputs that change the plan -------------------------------------------------------------------

    def set_held(self, held: PolicyVersion | None) -> bool:
        """Records the version in the engine and plans from it; returns True if the version changed."""
        if self.is_held_known and held == self.held:
            return False
        self.is_held_known, self.held = True, held
        self.replan()
        return True

    def set_missing(self, patch: Patch, chunks: Collection[Digest]) -> bool:
        """Records the chunks of a patch that are not on the disk; returns True if the patch is known and complete."""
        if patch.digest not in self.known:
            return False
        self._missing[patch.digest] = set(chunks)
        self._queue = None
        return not chunks

    def add_chunk(self, chunk: Digest) -> list[Patch]:
        """Records that a chunk is on the disk; returns the patches that it completes."""
        if self._queue is not None:
            self._queue.remove(chunk)
        complete: list[Patch] = []
        for patch in self.known.patches:
            missing = self._missing.get(patch.digest)
            if missing and chunk in missing:
                missing.discard(chunk)
                complete += [] if missing else [patch]
        return complete

    def mark_unobtainable(self, chunk: Digest) -> None:
        """Plans again without a chunk that no connected source has."""
        self._unobtainable.add(chunk)
        self.replan()

    def mark_obtainable(self, chunks: Collection[Digest] | None = None) -> None:
        """Allows these chunks in plans again (None: all chunks), since a source may have them now."""
        before = len(self._unobtainable)
        self._unobtainable = set() if chunks is None else self._unobtainable.difference(chunks)
        if len(self._unobtainable) < before:
            self.replan()

    def record_refusal(self, target: PolicyVersion, *, is_unusable: bool) -> int:
        """Counts the engine's refusal of a version whose chain was complete on the disk; returns the count.

        Args:
            is_unusable: the chunks do not give the version: after MAX_REFUSALS no chain leads through it either.
        """
        self._refusals[target.digest] += 1
        if is_unusable and self._refusals[target.digest] >= MAX_REFUSALS:
            self._unusable.add(target.digest)
        return self._refusals[target.digest]

    def record_applied(self, version: PolicyVersion) -> None:
        """Plans from a version that the engine applied, and forgets all refusals."""
        self._refusals.clear()
        self._unusable.clear()
        self.is_held_known, self.held = True, version
        self.replan()

    def replan(self) -> None:
        """Plans the cheapest chain to the newest version, or to an older version if the payloads exceed `max_bytes`."""
        self._missing = {digest: missing for digest, missing in self._missing.items() if digest in self.known}
        self._queue = None
        self.plan = ()
        if not self.is_held_known:
            return
        newest = next(self._chains(self._cost), None)
        if newest is not None and not self._has_room(newest):  # a chain with less in all may fit
            newest = next(filter(self._has_room, self._chains(self._size)), None)
        self.plan = newest or ()

    def _chains(self, cost: Cost) -> Iterator[tuple[Patch, ...]]:
        """Chains to versions that the engine may take, newest first.

        A chain may lead through a refused version, which is then staged but not loaded: the cause may have passed.
        """
        chains = self.known.chains(self.held, cost)
        return (chain for chain in chains if not self._is_refused(chain[-1].version))

    def _is_refused(self, version: PolicyVersion) -> bool:
        return self._refusals[version.digest] >= MAX_REFUSALS

    def _has_room(self, chain: tuple[Patch, ...]) -> bool:
        return sum(patch.manifest.payload_bytes for patch in chain) <= self._max_bytes

    def _cost(self, patch: Patch) -> int | None:
        missing = self._missing.get(patch.digest)
        if missing is None or not missing.isdisjoint(self._unobtainable) or patch.version.digest in self._unusable:
            return None
        manifest = patch.manifest
        to_fetch = manifest.payload_bytes * len(missing) // max(1, len(manifest.chunks))
        return to_fetch + manifest.payload_bytes // _DECODE_SHARE

    def _size(self, patch: Patch) -> int | None:
        return None if self._cost(patch) is None else patch.manifest.payload_bytes

    # --- the plan --------------------------------------------------------------------------------------

    def missing_chunks(self) -> Iterator[Digest]:
        """Missing chunks of the plan, in the order of use."""
        for patch in self.plan:
            missing = self._missing.get(patch.digest)
            if missing:
                yield from (digest for digest in patch.manifest.chunks if digest in missing)

    @property
    def queue(self) -> ChunkQueue:
        """`missing_chunks` as a queue, rebuilt once the plan or a patch's missing chunks have been replaced."""
        if self._queue is None:
            self._queue = ChunkQueue(self.missing_chunks())
        return self._queue

    def ready(self) -> tuple[Patch, ...]:
        """The patches of the plan before the first incomplete one; none if they would lead the engine backwards.

        They never end at a version that the engine refused.
        """
        if len(self.plan) == 1 and self.held is not None and self.plan[0].version.digest == self.held.digest:
            return self.plan  # only a new name for the weights in the engine
        num_ready = next((at for at, patch in enumerate(self.plan) if not self.are_complete([patch])), len(self.plan))
        while num_ready and self._is_refused(self.plan[num_ready - 1].version):
            num_ready -= 1
        ready = self.plan[:num_ready]
        return ready if not ready or not self.known.is_behind(ready[-1].version.step, self.held) else ()

    def are_complete(self, patches: Collection[Patch]) -> bool:
        """True if every chunk of these patches is on the disk."""
        return not any(self._missing.get(patch.digest, _UNKNOWN) for patch in patches)

    @property
    def is_ready(self) -> bool:
        """True if `ready` is the whole plan."""
        return len(self.ready()) == len(self.plan)
