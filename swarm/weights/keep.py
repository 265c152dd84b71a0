"""Which manifests a store keeps when it cannot keep them all.

Invariant: the cheapest way from nothing to the newest version of a lineage in force that can be reached within the
budget is kept; of everything else the oldest goes first. Pure: nothing here touches a disk.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from swarm.types import Digest, NodeId
from swarm.weights.manifest import Manifest
from swarm.weights.plan import Offer, cheapest_route

KEPT_MANIFESTS: Final = 64  # of each lineage, besides those that the newest anchor and what came after it need

Named = tuple[Digest, Manifest]  # with the digest of its body


def choose_kept(
    manifests: Sequence[Named], in_force: Collection[NodeId], size_of: Callable[[Digest], int], max_bytes: int
) -> set[Digest]:
    """Digests of the manifests to keep.

    Args:
        manifests: all that are held.
        in_force: lineages that this node trains or follows; others only get what room is left.
        size_of: bytes that a chunk takes up here, 0 where it is not held.
        max_bytes: for all chunks together.
    """
    lineages: dict[NodeId, list[Named]] = {}
    for named in manifests:
        lineages.setdefault(named[1].version.policy_id, []).append(named)
    ways, after, older = list[Named](), list[Named](), list[Named]()
    for policy_id, members in lineages.items():
        way, newer, rest = _tiers(members, max_bytes)
        if policy_id in in_force:
            ways, after, older = ways + way, after + newer, older + rest
        else:
            older += way + newer + rest
    return _fill(ways, (*_newest_first(after), *_newest_first(older)), size_of, max_bytes)


def _fill(
    always: Iterable[Named], wanted: Iterable[Named], size_of: Callable[[Digest], int], max_bytes: int
) -> set[Digest]:
    """All of `always`, and of `wanted` in order until the first that does not fit; shared chunks count once."""
    kept, chunks, num_bytes = set[Digest](), set[Digest](), 0
    for digest, manifest in always:
        kept.add(digest)
        num_bytes += sum(map(size_of, set(manifest.chunks) - chunks))
        chunks.update(manifest.chunks)
    for digest, manifest in wanted:
        num_bytes += sum(map(size_of, set(manifest.chunks) - chunks))
        if num_bytes > max_bytes:
            break
        kept.add(digest)
        chunks.update(manifest.chunks)
    return kept


def _tiers(members: list[Named], max_bytes: int) -> tuple[list[Named], list[Named], list[Named]]:
    """The way to the newest version of one lineage within the budget, what else follows its newest anchor, and the
    newest of the rest."""
    head = max(manifest.version.step for _, manifest in members)
    anchor = max((m.version.step for _, m in members if m.base is None), default=0)
    way = _way_within(max_bytes, members)
    on_way = {digest for digest, _ in way}
    after = [named for named in members if named[0] not in on_way and _leads_on(named[1], anchor, head)]
    needed = on_way | {digest for digest, _ in after}
    rest = _newest_first(named for named in members if named[0] not in needed)
    return way, after, rest[:KEPT_MANIFESTS]


def _way_within(max_bytes: int, members: list[Named]) -> list[Named]:
    for step in sorted({manifest.version.step for _, manifest in members}, reverse=True):
        way = _way_to(step, members)
        if sum(manifest.payload_bytes for _, manifest in way) <= max_bytes:
            return way
    return []


def _way_to(head: int, members: list[Named]) -> list[Named]:
    by_leg: dict[tuple[int, int | None], Named] = {}
    for named in members:
        manifest = named[1]
        by_leg[manifest.version.step, None if manifest.base is None else manifest.base.step] = named
    offers = [Offer(step=s, base_step=b, num_bytes=named[1].payload_bytes) for (s, b), named in by_leg.items()]
    route = cheapest_route(offers, (), head)
    if route is None:  # only patches: those to the head
        return [named for (step, _), named in by_leg.items() if step == head]
    return [by_leg[leg.step, leg.base_step] for leg in route]


def _leads_on(manifest: Manifest, anchor: int, head: int) -> bool:
    """The newest anchor, a patch between neighbours after it, or one to the head."""
    if manifest.base is None:
        return manifest.version.step == anchor
    if manifest.base.step < anchor:
        return manifest.version.step == head
    return manifest.version.step == head or manifest.version.step == manifest.base.step + 1


def _newest_first(members: Iterable[Named]) -> list[Named]:
    return sorted(members, key=lambda named: -named[1].version.step)
