"""Patch graph: weights are nodes, patches are edges, a patch chain is a path.

Invariant: a path starts at held weights or at nothing, and each patch starts from the weights that the last one gave.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from swarm.types import Digest, PolicyVersion, SealedManifest
from swarm.weights.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One manifest as an edge: it leads from the weights of its base, or from nothing, to those of its version."""

    manifest: Manifest
    sealed: SealedManifest
    digest: Digest = field(init=False)  # of the manifest's body: hashed once, as plans look it up again and again

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.sealed.digest)

    @property
    def version(self) -> PolicyVersion:
        """The version that it gives."""
        return self.manifest.version

    @property
    def base(self) -> PolicyVersion | None:
        """The version that it starts from; None for weights in full."""
        return self.manifest.base


Cost = Callable[[Patch], int | None]
"""Bytes that a patch costs now; None where it cannot be obtained."""


class PatchGraph:
    """The cheapest patch chains from what is held, or from nothing, to all weights that can be reached.

    Nodes are digests: equal digests are the same weights, whatever their version is called. Among paths of equal cost
    the one with fewest patches counts, then the one whose patches came first.

    Args:
        patches: all that are known, in order of arrival.
        cost: of each.
        held: digest of the weights at hand; None where there are none.

    Example:
        graph = PatchGraph(patches, cost, held=version.digest)
        chain = graph.cheapest_to(newest.digest)
    """

    def __init__(self, patches: Iterable[Patch], cost: Cost, held: Digest | None = None) -> None:
        edges: dict[Digest | None, list[tuple[int, Patch]]] = {}  # by the weights that they start from
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
        """The patches to apply, in order; empty where these weights are held, None where no path leads to them."""
        if weights not in self._last:
            return None
        chain, patch = list[Patch](), self._last[weights]
        while patch is not None:
            chain.append(patch)
            patch = self._last[None if patch.base is None else patch.base.digest]
        return tuple(reversed(chain))
