"""What a follower knows of one lineage: which versions exist, and the cheapest way to the newest that can be had.

Invariant: no step has two versions. What the owner says on a connection of its own replaces what was known, so that a
trainer that was killed and went on from a checkpoint is followed onto its new branch; what others hand on never does,
or a holder could lead its watchers back onto a branch that is no more with manifests that were genuine once.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from swarm.types import Digest, NodeId, PolicyVersion, SealedManifest
from swarm.weights.manifest import Manifest
from swarm.weights.plan import Offer, Routes

MAX_BYTES: Final = 64 * 2**20  # of manifest bodies; the oldest versions are forgotten first
MAX_MANIFESTS: Final = 4096


class NewsKind(StrEnum):
    """What a manifest turned out to be."""

    NEW = "new"
    KNOWN = "known"
    ANOTHER_BRANCH = "another_branch"  # a step that is known with other weights, from somebody else than the owner
    TOO_OLD = "too_old"  # older than what there is room to remember


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One manifest of the lineage, opened."""

    manifest: Manifest
    sealed: SealedManifest

    @property
    def digest(self) -> Digest:
        """Of the manifest's body."""
        return self.sealed.digest

    @property
    def version(self) -> PolicyVersion:
        """Where it leads."""
        return self.manifest.version


Cost = Callable[[Patch], int | None]
"""Bytes that a leg costs now; None where it cannot be had."""

_Ends = tuple[Digest, Digest | None]  # weights that a leg gives, and those it starts from


class Lineage:
    """The versions of one owner, and the manifests that lead to them.

    Example:
        lineage = Lineage(trainer_id)
        lineage.add(Leg(manifest=manifest, sealed=sealed), is_from_owner=True)
        newest = next(lineage.ways(held, cost), None)
    """

    def __init__(self, policy_id: NodeId) -> None:
        self.policy_id = policy_id
        self._patches: dict[Digest, Patch] = {}  # by digest of the manifest, in order of arrival
        self._steps: dict[int, PolicyVersion] = {}
        self._num_bytes = 0

    def add(self, patch: Patch, *, is_from_owner: bool) -> tuple[NewsKind, list[Patch]]:
        """Takes an opened manifest of this lineage.

        Returns:
            What it is, and the legs that are forgotten for it: of a branch that is no more, or too old.
        """
        assert patch.version.policy_id == self.policy_id
        if patch.digest in self._patches:
            return NewsKind.KNOWN, []
        named = [patch.version] if patch.manifest.base is None else [patch.manifest.base, patch.version]
        conflicts = [version.step for version in named if self._steps.get(version.step, version) != version]
        if conflicts and not is_from_owner:
            return NewsKind.ANOTHER_BRANCH, []
        forgotten = self._forget(lambda step: step >= min(conflicts)) if conflicts else []
        self._patches[patch.digest] = patch
        self._steps[patch.version.step] = patch.version
        self._num_bytes += len(patch.sealed.body)
        forgotten += self._forget_oldest()
        return (NewsKind.NEW if patch.digest in self._patches else NewsKind.TOO_OLD), forgotten

    def rewind(self, head_step: int) -> list[Patch]:
        """The owner says that its newest version is this one: what was beyond it is no more. Returns what went."""
        return self._forget(lambda step: step > head_step)

    def forget(self, digests: Collection[Digest]) -> None:
        """Forgets these manifests, as the store did."""
        self._remove([patch for digest, patch in self._patches.items() if digest in digests])

    def get(self, digest: Digest) -> Patch | None:
        """A known manifest."""
        return self._patches.get(digest)

    def knows(self, digest: Digest) -> bool:
        """Whether a manifest is known."""
        return digest in self._patches

    @property
    def head(self) -> PolicyVersion | None:
        """The newest version."""
        return self._steps[max(self._steps)] if self._steps else None

    @property
    def patches(self) -> Collection[Patch]:
        """Every manifest known."""
        return self._patches.values()

    def ways(self, held: PolicyVersion | None, cost: Cost) -> Iterator[tuple[Patch, ...]]:
        """The cheapest legs from what is held, or from nothing, to each newer version that can be had, newest first.

        Args:
            held: what the engine serves; equal digests are the same weights, whatever they are called.
            cost: of each leg.
        """
        cheapest = self._cheapest(cost)
        numbers = _numbered(cheapest)
        offers = [
            Offer(step=numbers[to], base_step=None if base is None else numbers[base], num_bytes=num_bytes)
            for (to, base), (num_bytes, _) in cheapest.items()
        ]
        routes = Routes(offers, [] if held is None or held.digest not in numbers else [numbers[held.digest]])
        patches = {offer: patch for offer, (_, patch) in zip(offers, cheapest.values(), strict=True)}
        leads_back = self._leads_back(held)
        for step in sorted(self._steps, reverse=True):
            target = self._steps[step]
            if target == held or leads_back(step):
                return
            if held is not None and held.digest == target.digest:  # under another name: any leg says so
                yield next((patch,) for patch in self._patches.values() if patch.version == target)
                continue
            route = routes.to(numbers[target.digest]) if target.digest in numbers else None
            if route is not None:
                yield tuple(patches[offer] for offer in route)

    def is_behind(self, step: int, held: PolicyVersion | None) -> bool:
        """True for a step before what is held, unless the owner went back or what is held is of a branch that is no
        more. What is held may have been forgotten here: that alone is no reason to go back."""
        return self._leads_back(held)(step)

    def _leads_back(self, held: PolicyVersion | None) -> Callable[[int], bool]:
        if held is None or held.policy_id != self.policy_id:
            return lambda step: False
        is_in_force = max(self._steps, default=-1) >= held.step and self._steps.get(held.step, held) == held
        return lambda step: is_in_force and step <= held.step

    def _cheapest(self, cost: Cost) -> "dict[_Ends, tuple[int, Patch]]":
        """Of the legs with the same ends the one that costs least, and what it costs."""
        cheapest: dict[_Ends, tuple[int, Patch]] = {}
        for patch in self._patches.values():
            num_bytes = cost(patch)
            ends = patch.version.digest, None if patch.manifest.base is None else patch.manifest.base.digest
            if num_bytes is not None and (ends not in cheapest or num_bytes < cheapest[ends][0]):
                cheapest[ends] = num_bytes, patch
        return cheapest

    # --- forgetting --------------------------------------------------------------------------------

    def _forget(self, is_gone: Callable[[int], bool]) -> list[Patch]:
        gone = [patch for patch in self._patches.values() if is_gone(patch.version.step)]
        return self._remove(gone)

    def _forget_oldest(self) -> list[Patch]:
        gone: list[Patch] = []
        while (len(self._patches) > MAX_MANIFESTS or self._num_bytes > MAX_BYTES) and len(self._steps) > 1:
            oldest = min(self._steps)
            gone += self._forget(lambda step: step == oldest)  # noqa: B023 - called at once
        return gone

    def _remove(self, gone: list[Patch]) -> list[Patch]:
        for patch in gone:
            del self._patches[patch.digest]
            self._num_bytes -= len(patch.sealed.body)
        steps = {patch.version.step for patch in self._patches.values()}
        for step in {patch.version.step for patch in gone} - steps:
            del self._steps[step]
        return gone


def _numbered(ends: Iterable[_Ends]) -> dict[Digest, int]:
    """A number for each of these weights."""
    digests = dict.fromkeys(digest for pair in ends for digest in pair if digest is not None)
    return {digest: number for number, digest in enumerate(digests)}
