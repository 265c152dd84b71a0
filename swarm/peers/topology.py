"""Overlay topology: a ring for connectivity plus hash-random links for a small diameter.

Invariant: among nodes that see the same adverts groups reach every node from every other, and a peer that comes or
goes changes at most one neighbour of any node.
"""

import hashlib
import heapq
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from swarm.types import Advert, NodeId


def choose_neighbours(own: NodeId, adverts: Sequence[Advert], limit: int) -> list[Advert]:
    """Neighbours of a node: the next dialable peer in the order of ids, then those of lowest hash rank.

    The next peer alone makes the overlay one ring, strongly connected whatever the other links are. Those are ranked
    by a hash of both ids: a different random choice at each node, which hardly changes when peers come and go. A
    distance of ids (XOR) would not do: near nodes share their neighbours, and the swarm falls into cliques of about
    `limit` nodes that no relaying crosses.

    Args:
        own: the node that chooses; its own advert is left out.
        adverts: from the directory, at most one of each peer.
        limit: neighbours wanted.
    """
    peers = [advert for advert in adverts if advert.node_id != own and advert.endpoints]
    if limit <= 0 or not peers:
        return []
    successor = min([advert for advert in peers if advert.node_id > own] or peers, key=attrgetter("node_id"))
    others = (advert for advert in peers if advert is not successor)
    return [successor, *heapq.nsmallest(limit - 1, others, key=lambda advert: rank(own, advert.node_id))]


@lru_cache(maxsize=2**16)  # a node looks at the same peers again and again
def rank(own: NodeId, peer: NodeId) -> bytes:
    """Rank of a peer at a node, fixed and different at each node; the lowest come first."""
    return hashlib.sha256((own + peer).encode()).digest()
