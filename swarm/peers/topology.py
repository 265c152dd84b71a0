"""Overlay topology: a ring for connectivity, links that are kept, and hash-random links for a small diameter.

Invariant: among nodes that know the same peers, groups reach every node from every other, and a peer that comes or goes
changes at most one neighbour of any node; the peers known longest keep half of the places.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from swarm.interfaces import PeerAddress
from swarm.peers.address_book import budget_key_of, is_public
from swarm.types import NodeId


def choose_neighbours(
    own: NodeId, peers: Sequence[PeerAddress], limit: int, kept: Sequence[PeerAddress] = ()
) -> list[PeerAddress]:
    """Neighbours of a node: the next peer in the order of ids, then kept peers, then those of lowest hash rank.

    The next peer alone makes the overlay one ring, strongly connected whatever the other links are. The last are ranked
    by a hash of both ids: a different random choice at each node, which hardly changes when peers come and go. A
    distance of ids (XOR) would not do: near nodes share their neighbours, and the swarm falls into cliques of about
    `limit` nodes that no relaying crosses. Anybody can make ids that rank first, so half of the places go by `kept`.

    One subnet of the public network gets at most a quarter of the places, and at least one; more only if places stay
    free: a laboratory may have all its nodes in one.

    Args:
        own: id of the choosing node; its own address is left out.
        peers: addresses that can be dialled, at most one for each peer.
        limit: number of neighbours wanted.
        kept: those of `peers` that keep a place as long as they work, best first.
    """
    peers, kept = ([peer for peer in some if peer.node_id != own] for some in (peers, kept))
    if limit <= 0 or not peers:
        return []
    successor = min([peer for peer in peers if peer.node_id > own] or peers, key=attrgetter("node_id"))
    places = _Places(limit)
    places.take([successor], limit)
    places.take(kept, 1 + limit // 2)
    ranked = sorted(peers, key=lambda peer: rank(own, peer.node_id))
    places.take(ranked, limit)
    places.most_of_subnet = limit
    places.take(ranked, limit)
    return list(places.chosen)


class _Places:
    """The chosen peers, and their number in each public subnet."""

    def __init__(self, limit: int) -> None:
        self.chosen: dict[PeerAddress, None] = {}
        self.most_of_subnet = max(1, limit // 4)
        self._of_subnet = Counter[str]()

    def take(self, peers: Sequence[PeerAddress], until: int) -> None:
        """Gives places to peers in their order until `until` places are taken; skips peers of a full subnet."""
        for peer in peers:
            if len(self.chosen) >= until:
                return
            if peer in self.chosen:
                continue
            if is_public(peer.endpoint):
                subnet = budget_key_of(peer.endpoint)
                if self._of_subnet[subnet] >= self.most_of_subnet:
                    continue
                self._of_subnet[subnet] += 1
            self.chosen[peer] = None


@lru_cache(maxsize=2**16)  # a node looks at the same peers again and again
def rank(own: NodeId, peer: NodeId) -> bytes:
    """Sort key of `peer` at node `own`: SHA-256 of both ids, 32 bytes; fixed at a node, unrelated between nodes."""
    return hashlib.sha256((own + peer).encode()).digest()
