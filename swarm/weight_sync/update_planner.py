"""The way from what an engine holds to the newest version that can be had, and what of it is not on the disk yet.

Invariant: the plan is always the cheapest way by what is known now: what lies on the disk costs next to nothing, so a
newer version changes the plan without throwing away what was fetched for the one before. Pure bookkeeping.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

from swarm.types import Digest, PolicyVersion
from swarm.weight_sync.chunk_queue import ChunkQueue
from swarm.weight_sync.patch_graph import Cost, Lineage, Patch

MAX_REFUSALS: Final = 2  # attempts of an engine at one version
_DECODE_SHARE: Final = 64  # decoding so many bytes is as dear as fetching one: docs/measurements/weights.md
_UNKNOWN: Final = frozenset({b""})  # chunks that a manifest lacks while nobody has looked


class UpdatePlanner:
    """What is planned for one engine that follows a lineage.

    Args:
        lineage: what is known of it.
        max_bytes: of all payloads of one way together, whatever of them is on the disk; where the way to the newest
            version needs more, an older one is made for first.

    Example:
        ways = UpdatePlanner(lineage, max_bytes=2**33)
        ways.starts_from(held)
        for digest in ways.wanted(): ...
    """

    def __init__(self, lineage: Lineage, max_bytes: int) -> None:
        self.lineage = lineage
        self._max_bytes = max_bytes
        self.plan: tuple[Patch, ...] | None = None  # empty: the engine has the newest; None: no way is known
        self.held: PolicyVersion | None = None  # what the engine serves
        self._is_asked = False  # the worker said what the engine holds
        self._missing: dict[Digest, set[Digest]] = {}  # manifest -> its chunks that are not on the disk
        self._lost: set[Digest] = set()  # chunks that no connected holder has
        self._refusals: Counter[Digest] = Counter()  # of weights that the engine did not take
        self._queue: ChunkQueue | None = None  # of the plan; None until it is asked for
        self._unusable: set[Digest] = set()  # those of them that could not be made of what was fetched

    # --- what changes the plan -------------------------------------------------------------------------

    def starts_from(self, held: PolicyVersion | None) -> bool:
        """What the engine holds. True where that is news."""
        if self._is_asked and held == self.held:
            return False
        self._is_asked, self.held = True, held
        self.replan()
        return True

    def lacks(self, patch: Patch, chunks: Collection[Digest]) -> bool:
        """These chunks of a manifest are not on the disk. True where none is missing."""
        if self.lineage.knows(patch.digest):
            self._missing[patch.digest] = set(chunks)
            self._queue = None
        return not chunks and self.lineage.knows(patch.digest)

    def came(self, chunk: Digest) -> list[Patch]:
        """A chunk is on the disk now. Returns the manifests of which it was the last."""
        if self._queue is not None:
            self._queue.came(chunk)
        whole: list[Patch] = []
        for patch in self.lineage.patches:
            missing = self._missing.get(patch.digest)
            if missing and chunk in missing:
                missing.discard(chunk)
                whole += [] if missing else [patch]
        return whole

    def lost(self, chunk: Digest) -> None:
        """Nobody who is connected has it: no way leads over it."""
        self._lost.add(chunk)
        self.replan()

    def found(self, chunks: Collection[Digest] | None = None) -> None:
        """Somebody may have these chunks, or (None) any."""
        before = len(self._lost)
        self._lost = set() if chunks is None else self._lost.difference(chunks)
        if len(self._lost) < before:
            self.replan()

    def refused(self, target: PolicyVersion, *, is_unusable: bool) -> int:
        """The engine did not take a version whose way was whole on the disk. Returns how often so far.

        Args:
            is_unusable: what lies on the disk does not give it: in the end no way leads through it, either.
        """
        self._refusals[target.digest] += 1
        if is_unusable and self._refusals[target.digest] >= MAX_REFUSALS:
            self._unusable.add(target.digest)
        return self._refusals[target.digest]

    def taken(self, version: PolicyVersion) -> None:
        """The engine serves it."""
        self._refusals.clear()
        self._unusable.clear()
        self._is_asked, self.held = True, version
        self.replan()

    def replan(self) -> None:
        """Looks for the cheapest way by what is known and missing now."""
        self._missing = {digest: missing for digest, missing in self._missing.items() if self.lineage.knows(digest)}
        self.plan = self._way() if self._is_asked else None
        self._queue = None

    def _way(self) -> tuple[Patch, ...] | None:
        newest = next(self._ways(self._cost), None)
        if newest is not None and self._has_room(newest):
            return newest
        smaller = () if newest is None else self._ways(self._size)  # perhaps one that needs less in all
        nothing = () if self.held is not None and self.held.policy_id == self.lineage.policy_id else None
        return next(filter(self._has_room, smaller), nothing)

    def _ways(self, cost: Cost) -> Iterator[tuple[Patch, ...]]:
        """To versions that the engine may take, newest first. One that it refused may lie on the way: it is staged
        there, not loaded, and what kept the engine from taking it may have passed."""
        ways = self.lineage.ways(self.held, cost)
        return (way for way in ways if not self._is_refused(way[-1].version))

    def _is_refused(self, version: PolicyVersion) -> bool:
        return self._refusals[version.digest] >= MAX_REFUSALS

    def _has_room(self, way: tuple[Patch, ...]) -> bool:
        return sum(patch.manifest.payload_bytes for patch in way) <= self._max_bytes

    # --- what follows from it --------------------------------------------------------------------------

    def wanted(self) -> Iterator[Digest]:
        """Chunks of the plan that are missing, in the order in which it needs them."""
        for patch in self.plan or ():
            missing = self._missing.get(patch.digest)
            if missing:
                yield from (digest for digest in patch.manifest.chunks if digest in missing)

    @property
    def queue(self) -> ChunkQueue:
        """The same, to be asked again and again."""
        if self._queue is None:
            self._queue = ChunkQueue(self.wanted())
        return self._queue

    def ready(self) -> tuple[Patch, ...]:
        """The legs of the plan up to the first that is not on the disk in whole; none where they would lead back.

        They never end at a version that the engine refused: it is only staged on the way to the next one.
        """
        plan = self.plan or ()
        if len(plan) == 1 and self.held is not None and plan[0].version.digest == self.held.digest:
            return plan  # the engine has these weights: only their name is new
        num_ready = next((at for at, patch in enumerate(plan) if not self.are_whole([patch])), len(plan))
        while num_ready and self._is_refused(plan[num_ready - 1].version):
            num_ready -= 1
        ready = plan[:num_ready]
        return ready if not ready or not self.lineage.is_behind(ready[-1].version.step, self.held) else ()

    def are_whole(self, patches: Collection[Patch]) -> bool:
        """Whether every chunk of these is on the disk."""
        return not any(self._missing.get(patch.digest, _UNKNOWN) for patch in patches)

    @property
    def is_at_hand(self) -> bool:
        """Whether everything that can be had is held, or on the disk."""
        return len(self.ready()) == len(self.plan or ())

    def _cost(self, patch: Patch) -> int | None:
        missing = self._missing.get(patch.digest)
        if missing is None or not missing.isdisjoint(self._lost) or patch.version.digest in self._unusable:
            return None
        manifest = patch.manifest
        to_fetch = manifest.payload_bytes * len(missing) // max(1, len(manifest.chunks))
        return to_fetch + manifest.payload_bytes // _DECODE_SHARE

    def _size(self, patch: Patch) -> int | None:
        return None if self._cost(patch) is None else patch.manifest.payload_bytes
