"""Retention: which manifests a weight store keeps when its budget cannot hold them all.

Invariant: the cheapest patch chain from nothing to the newest version of a lineage in force that fits the budget is
kept; of everything else the oldest goes first. Pure: nothing here touches a disk.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from swarm.types import Digest, NodeId
from swarm.weights.patch_graph import Patch, PatchGraph

KEPT_MANIFESTS: Final = 64  # of each lineage, besides those that the newest anchor and what came after it need


def choose_kept(
    patches: Sequence[Patch], in_force: Collection[NodeId], size_of: Callable[[Digest], int], max_bytes: int
) -> set[Digest]:
    """Digests of the manifests to keep.

    Args:
        patches: all that are held.
        in_force: lineages that this node trains or follows; others only get what room is left.
        size_of: bytes that a chunk takes up here, 0 where it is not held.
        max_bytes: for all chunks together.
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
    # All of the chains, then the rest in order until the first that does not fit; shared chunks count once.
    kept, chunks, num_bytes = set[Digest](), set[Digest](), 0
    for number, patch in enumerate((*chains, *_newest_first(after), *_newest_first(older))):
        num_bytes += sum(map(size_of, set(patch.manifest.chunks) - chunks))
        if num_bytes > max_bytes and number >= len(chains):
            break
        kept.add(patch.digest)
        chunks.update(patch.manifest.chunks)
    return kept


def _tiers(members: list[Patch], max_bytes: int) -> tuple[list[Patch], list[Patch], list[Patch]]:
    """The chain to the newest version of one lineage within the budget, what else follows its newest anchor, and the
    newest of the rest."""
    head = max(patch.version.step for patch in members)
    anchor = max((patch.version.step for patch in members if patch.base is None), default=0)
    chain = _chain_within(max_bytes, members)
    in_chain = {patch.digest for patch in chain}
    after = [patch for patch in members if patch.digest not in in_chain and _leads_on(patch, anchor, head)]
    needed = in_chain | {patch.digest for patch in after}
    rest = _newest_first(patch for patch in members if patch.digest not in needed)
    return chain, after, rest[:KEPT_MANIFESTS]


def _chain_within(max_bytes: int, members: list[Patch]) -> list[Patch]:
    """The cheapest chain from nothing to the newest version that fits the budget."""
    graph = PatchGraph(members, lambda patch: patch.manifest.payload_bytes)
    for target in _newest_first({patch.version: patch for patch in members}.values()):
        chain = graph.cheapest_to(target.version.digest)
        if chain is None:  # nothing in full is held: the patches to it
            chain = [patch for patch in members if patch.version == target.version]
        if sum(patch.manifest.payload_bytes for patch in chain) <= max_bytes:
            return list(chain)
    return []


def _leads_on(patch: Patch, anchor: int, head: int) -> bool:
    """The newest anchor, a patch between neighbours after it, or one to the head."""
    if patch.base is None:
        return patch.version.step == anchor
    if patch.base.step < anchor:
        return patch.version.step == head
    return patch.version.step == head or patch.version.step == patch.base.step + 1


def _newest_first(members: Iterable[Patch]) -> list[Patch]:
    return sorted(members, key=lambda patch: -patch.version.step)
