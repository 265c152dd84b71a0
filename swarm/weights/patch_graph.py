"""Patch graph: weights are nodes, patches are edges, a patch chain is a path; also chooses the patches a store keeps.

Invariants of a patch chain p1 ... pn from held weights h (None: nothing held) to a version v, and where they hold:

    base(p1) in {None, h}                     PatchGraph starts only at these
    digest(base(p_i+1)) = digest(p_i)         edges join equal digests; `apply` compares again before decoding
    digest(pn) = digest(v)                    compared tensor by tensor and as a whole before an engine sees it
    bytes(chain) = min over all chains        Dijkstra; then fewest patches, then earliest arrival
    sum of payload_bytes <= max_bytes         of a planned chain (`UpdatePlanner`) and of a kept one (`choose_kept`)
    lineage(base) = lineage(p), steps differ  checked when the manifest is opened
    chunks on the disk before the manifest    of what is published or served; a fetched manifest comes first
    a chain from nothing to the newest version that fits max_bytes is always kept

Names do not matter: equal digests are the same weights. A patch is lossless, so any chain gives the same bits as the
full file. Nothing here touches a disk.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from swarm.types import Digest, NodeId, PolicyVersion, SealedManifest
from swarm.weights.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A manifest as an edge from its base's weights, or from nothing, to the weights of its version."""

    manifest: Manifest
    sealed: SealedManifest
    digest: Digest = field(init=False)  # of the manifest's body, hashed once since plans look it up often

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.sealed.digest)

    @property
    def version(self) -> PolicyVersion:
        """Target of the patch."""
        return self.manifest.version

    @property
    def base(self) -> PolicyVersion | None:
        """Start of the patch; None for a full version."""
        return self.manifest.base


Cost = Callable[[Patch], int | None]
"""Bytes that a patch costs now; None where it cannot be obtained."""


class PatchGraph:
    """The cheapest patch chains from held weights, or from nothing, to all weights that can be reached.

    Args:
        patches: known ones, in order of arrival.
        held: digest of the held weights; None if no weights are held.
    """

    def __init__(self, patches: Iterable[Patch], cost: Cost, held: Digest | None = None) -> None:
        edges: dict[Digest | None, list[tuple[int, Patch]]] = {}  # by starting weights
        for patch in patches:
            num_bytes = cost(patch)
            if num_bytes is not None:
                edges.setdefault(None if patch.base is None else patch.base.digest, []).append((num_bytes, patch))
        self._last: dict[Digest | None, Patch | None] = {}  # patch that leads to each node; None at a start
        # Dijkstra: bytes, patches, order of arrival, node, the patch to it.
        frontier: list[tuple[int, int, int, Digest | None, Patch | None]] = [(0, 0, 0, None, None)]
        if held is not None:
            heappush(frontier, (0, 0, 1, held, None))
        order = len(frontier)
        while frontier:
            num_bytes, num_patches, _, node, last = heappop(frontier)
            if node in self._last:
                continue
            self._last[node] = last
            for more_bytes, patch in edges.get(node, ()):
                order += 1
                heappush(frontier, (num_bytes + more_bytes, num_patches + 1, order, patch.version.digest, patch))

    def cheapest_to(self, weights: Digest) -> tuple[Patch, ...] | None:
        """The patches to apply, in order; empty for held weights, None if no path leads to `weights`."""
        if weights not in self._last:
            return None
        chain, patch = list[Patch](), self._last[weights]
        while patch is not None:
            chain.append(patch)
            patch = self._last[None if patch.base is None else patch.base.digest]
        return tuple(reversed(chain))


# --- patches that a full store keeps ----------------------------------------------------------


KEPT_MANIFESTS: Final = 64  # of each lineage, besides its newest anchor and the patches after that anchor


def choose_kept(
    patches: Sequence[Patch], in_force: Collection[NodeId], size_of: Callable[[Digest], int], max_bytes: int
) -> set[Digest]:
    """Digests of the manifests to keep in a store.

    The cheapest chain from nothing to the newest version that fits the budget is always kept for each lineage in force,
    even if these chains together exceed the budget. Other patches are kept until the first one that does not fit: first
    those that follow the newest anchor, newest first, then the rest, newest first.

    Args:
        in_force: lineages that this node trains or follows; patches of other lineages belong to the rest.
        size_of: returns the bytes of a chunk that is held, else 0.
        max_bytes: budget for all chunks together.
    """
    lineages: dict[NodeId, list[Patch]] = {}
    for patch in patches:
        lineages.setdefault(patch.version.policy_id, []).append(patch)
    chains, after, older = list[Patch](), list[Patch](), list[Patch]()
    for policy_id, members in lineages.items():
        chain, newer, rest = _tiers(members, max_bytes)
        if policy_id in in_force:
            chains, after, older = chains + chain, after + newer, older + rest
        else:
            older += chain + newer + rest
    # All of the chains, then the rest in order until the first misfit; shared chunks count once.
    kept, chunks, num_bytes = set[Digest](), set[Digest](), 0
    for number, patch in enumerate((*chains, *_newest_first(after), *_newest_first(older))):
        num_bytes += sum(map(size_of, set(patch.manifest.chunks) - chunks))
        if num_bytes > max_bytes and number >= len(chains):
            break
        kept.add(patch.digest)
        chunks.update(patch.manifest.chunks)
    return kept


def _tiers(members: list[Patch], max_bytes: int) -> tuple[list[Patch], list[Patch], list[Patch]]:
    """Tiers of one lineage: the chain within the budget, patches since the newest anchor, the newest of the rest."""
    head = max(patch.version.step for patch in members)
    anchor = max((patch.version.step for patch in members if patch.base is None), default=0)
    chain = _chain_within(max_bytes, members)
    in_chain = {patch.digest for patch in chain}
    after = [patch for patch in members if patch.digest not in in_chain and _leads_on(patch, anchor, head)]
    needed = in_chain | {patch.digest for patch in after}
    rest = _newest_first(patch for patch in members if patch.digest not in needed)
    return chain, after, rest[:KEPT_MANIFESTS]


def _chain_within(max_bytes: int, members: list[Patch]) -> list[Patch]:
    """The cheapest chain from nothing to the newest version whose chain fits the budget; empty if none fits.

    If no chain from nothing leads to a version, the patches to that version count as its chain.
    """
    graph = PatchGraph(members, lambda patch: patch.manifest.payload_bytes)
    for target in _newest_first({patch.version: patch for patch in members}.values()):
        chain = graph.cheapest_to(target.version.digest)
        if chain is None:  # nothing in full is held: the patches to it
            chain = [patch for patch in members if patch.version == target.version]
        if sum(patch.manifest.payload_bytes for patch in chain) <= max_bytes:
            return list(chain)
    return []


def _leads_on(patch: Patch, anchor: int, head: int) -> bool:
    """True for the newest anchor, a patch by one step after that anchor, or a patch to the head step."""
    if patch.base is None:
        return patch.version.step == anchor
    if patch.base.step < anchor:
        return patch.version.step == head
    return patch.version.step == head or patch.version.step == patch.base.step + 1


def _newest_first(members: Iterable[Patch]) -> list[Patch]:
    return sorted(members, key=lambda patch: -patch.version.step)
