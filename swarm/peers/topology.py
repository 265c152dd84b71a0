"""Whom a node follows: a ring that leaves nobody out, and peers drawn by hash that keep the ways short.

Invariant: nodes that see the same adverts follow each other so that groups find a way from everyone to everyone, and
a peer that comes or goes changes at most one neighbour of any node.
"""

import hashlib
import heapq
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from swarm.types import Advert, NodeId


def choose_neighbours(own: NodeId, adverts: Sequence[Advert], limit: int) -> list[Advert]:
    """At most `limit` peers of those that can be dialled: the next one in the order of ids, then a fixed choice.

    The next one alone makes the graph of who follows whom one ring, so it is strongly connected whatever the others
    are. These are ranked by a hash of both ids: for each node another random choice, which hardly changes when peers
    come and go. Peers near by a distance of ids (XOR) would not do: whoever is near to a node is near to its
    neighbours, and the swarm falls into cliques of about `limit` that no relaying leaves.

    Args:
        own: the node that chooses; its own advert is left out.
        adverts: what it sees in the directory, at most one of each peer.
        limit: neighbours wanted.
    """
    peers = [advert for advert in adverts if advert.node_id != own and advert.endpoints]
    if limit <= 0 or not peers:
        return []
    following = min([advert for advert in peers if advert.node_id > own] or peers, key=attrgetter("node_id"))
    others = (advert for advert in peers if advert is not following)
    return [following, *heapq.nsmallest(limit - 1, others, key=lambda advert: rank(own, advert.node_id))]


@lru_cache(maxsize=2**16)  # a node looks at the same peers again and again
def rank(own: NodeId, peer: NodeId) -> bytes:
    """A fixed order of peers, another one at each node; the lowest come first."""
    return hashlib.sha256((own + peer).encode()).digest()
