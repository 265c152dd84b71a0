"""Which payloads bring a holder of one version to another one, at the fewest bytes.

Invariant: a route starts at what is held (or at nothing) and every leg starts where the one before it ended.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ANCHOR_EVERY: Final = 10  # versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One payload that somebody serves."""

    step: int  # of the version it gives
    base_step: int | None  # None: complete in itself
    num_bytes: int  # payload and manifest


def is_anchor(step: int, every: int = ANCHOR_EVERY) -> bool:
    """True for a version that is also published in full."""
    return step % every == 0


def cheapest_route(offers: Iterable[Offer], held: Iterable[int], wanted: int) -> tuple[Offer, ...] | None:
    """The legs to take, in order; empty where `wanted` is held, None where there is no way.

    Args:
        held: steps of all versions at hand (the running one, a kept anchor).
    """
    from_step: dict[int | None, list[Offer]] = {}
    for offer in offers:
        from_step.setdefault(offer.base_step, []).append(offer)
    order = 0
    frontier: list[tuple[int, int, int, int | None, tuple[Offer, ...]]] = [(0, 0, order, None, ())]
    for step in held:
        order += 1
        frontier.append((0, 0, order, step, ()))
    heapq.heapify(frontier)
    reached: set[int | None] = set()
    while frontier:
        num_bytes, num_legs, _, step, route = heapq.heappop(frontier)
        if step == wanted:
            return route
        if step in reached:
            continue
        reached.add(step)
        for offer in from_step.get(step, ()):
            order += 1
            leg = (num_bytes + offer.num_bytes, num_legs + 1, order, offer.step, (*route, offer))
            heapq.heappush(frontier, leg)
    return None


def route_bytes(route: Sequence[Offer]) -> int:
    """Of all its legs."""
    return sum(leg.num_bytes for leg in route)
