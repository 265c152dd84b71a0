"""Search of a distributed hash table for the peers nearest to a key.

Invariant: bounded in time, whatever peers answer; each peer is asked once; no call outlasts the search.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


async def nearest_peers(
    known: Iterable[tuple[int, Peer]],
    ask: Callable[[Peer], Awaitable[Iterable[tuple[int, Peer]] | None]],
    *,
    width: int,
    at_once: int,
    timeout_s: float,
) -> list[Peer]:
    """The peers that answered, nearest first, once the `width` nearest known ones were asked or the time is over.

    Ids are not proven, so a peer counts at the least distance that any peer names for it: no answer can move a peer
    away. Peers that do not answer are left out.

    Args:
        known: distance and peer, to begin with.
        ask: returns the distances and peers that a peer names, nearest first, of which `width` are read; None if the
            peer does not answer.
        width: number of nearest peers to ask, if there are as many.
        at_once: most concurrent calls of `ask`.
        timeout_s: time limit of the search.
    """
    distances: dict[Peer, int] = {}
    asked, answered = set[Peer](), set[Peer]()
    under_way: dict[asyncio.Future[Any], Peer] = {}

    def hear(named: Iterable[tuple[int, Peer]]) -> None:
        for distance, peer in named:
            distances[peer] = min(distance, distances.get(peer, distance))

    hear(known)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    nearest = heapq.nsmallest(width, distances.keys() - (asked - answered), key=distances.__getitem__)
                    new = [peer for peer in nearest if peer not in asked][: at_once - len(under_way)]
                    asked.update(new)
                    under_way |= {asyncio.ensure_future(ask(peer)): peer for peer in new}
                    if not under_way:
                        break
                    done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        peer, named = under_way.pop(task), task.result()
                        if named is not None:
                            answered.add(peer)
                            hear(islice(named, width))
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    return sorted(answered, key=distances.__getitem__)
