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


class Routes:
    """The cheapest way from what is held, or from nothing, to every version that can be reached.

    Args:
        offers: every payload that can be had.
        held: steps of all versions at hand (the running one, a kept anchor).

    Example:
        legs = Routes(offers, held=[5]).to(7)
    """

    def __init__(self, offers: Iterable[Offer], held: Iterable[int]) -> None:
        from_step: dict[int | None, list[Offer]] = {}
        for offer in offers:
            from_step.setdefault(offer.base_step, []).append(offer)
        self._last: dict[int | None, Offer | None] = {}  # the leg that leads to each; None where a way starts
        starts: list[int | None] = [None, *held]
        frontier: list[_Reached] = [(0, 0, order, step, None) for order, step in enumerate(starts)]
        order = len(frontier)
        while frontier:
            num_bytes, num_legs, _, step, last = heapq.heappop(frontier)
            if step in self._last:
                continue
            self._last[step] = last
            for offer in from_step.get(step, ()):
                order += 1
                heapq.heappush(frontier, (num_bytes + offer.num_bytes, num_legs + 1, order, offer.step, offer))

    def to(self, wanted: int) -> tuple[Offer, ...] | None:
        """The legs to take, in order; empty where `wanted` is held, None where there is no way."""
        if wanted not in self._last:
            return None
        legs, leg = list[Offer](), self._last[wanted]
        while leg is not None:
            legs.append(leg)
            leg = self._last[leg.base_step]
        return tuple(reversed(legs))


_Reached = tuple[int, int, int, int | None, Offer | None]  # bytes, legs, order of arrival, step, the leg to it


def cheapest_route(offers: Iterable[Offer], held: Iterable[int], wanted: int) -> tuple[Offer, ...] | None:
    """`Routes.to`, for one version."""
    return Routes(offers, held).to(wanted)


def route_bytes(route: Sequence[Offer]) -> int:
    """Of all its legs."""
    return sum(leg.num_bytes for leg in route)
