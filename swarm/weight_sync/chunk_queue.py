"""The chunks that a plan still needs, in order, and how far each holder was looked through for one that it can give.

Invariant: what lies before a holder's place is here, on its way, or not to be had of it; so while nothing fails, each
chunk is looked at once for each holder, however often the next one is asked for. Pure bookkeeping.
"""

from collections.abc import Callable, Iterable

from swarm.types import Digest, NodeId


class ChunkQueue:
    """What is to be fetched for one plan.

    Args:
        chunks: those that are missing, in the order in which they are needed.

    Example:
        queue = ChunkQueue(ways.wanted())
        at = queue.first(peer, lambda chunk: holders.can_have(peer, chunk))
        queue[at]
    """

    def __init__(self, chunks: Iterable[Digest]) -> None:
        self._missing = dict.fromkeys(chunks)
        self._chunks = tuple(self._missing)
        self._places: dict[NodeId, int] = {}

    def __getitem__(self, at: int) -> Digest:
        return self._chunks[at]

    def __contains__(self, chunk: Digest) -> bool:
        return chunk in self._missing

    def first(self, peer: NodeId, is_for: Callable[[Digest], bool]) -> int | None:
        """Where the first missing chunk stands that a holder is to be asked for; None where there is none."""
        at = self._places.get(peer, 0)
        while at < len(self._chunks) and not (self._chunks[at] in self._missing and is_for(self._chunks[at])):
            at += 1
        self._places[peer] = at
        return at if at < len(self._chunks) else None

    def came(self, chunk: Digest) -> None:
        """It is here."""
        self._missing.pop(chunk, None)

    def look_again(self) -> None:
        """A holder has more than it had, or a chunk that was on its way did not come."""
        self._places.clear()
