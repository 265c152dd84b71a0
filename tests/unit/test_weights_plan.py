"""Which payloads a node takes to get from one version to another."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarm.weights.plan import Offer, cheapest_route, is_anchor, route_bytes


def offer(base_step: int | None, step: int, num_bytes: int) -> Offer:
    return Offer(step=step, base_step=base_step, num_bytes=num_bytes)


def test_every_tenth_version_is_an_anchor() -> None:
    assert [step for step in range(31) if is_anchor(step)] == [0, 10, 20, 30]


def test_who_holds_the_version_takes_nothing() -> None:
    assert cheapest_route([offer(None, 5, 100)], held=[5], wanted=5) == ()


def test_a_laggard_takes_the_catch_up_patch_where_it_is_smaller_than_replaying() -> None:
    each = [offer(step - 1, step, 10) for step in range(1, 7)]
    catch_up, full = offer(0, 6, 40), offer(None, 6, 1000)
    assert cheapest_route([*each, catch_up, full], held=[0], wanted=6) == (catch_up,)
    assert cheapest_route([*each, full], held=[0], wanted=6) == tuple(each)
    assert cheapest_route([*each, catch_up, full], held=[4], wanted=6) == tuple(each[4:])


def test_a_newcomer_takes_an_anchor_and_patches() -> None:
    anchor, patch, full = offer(None, 10, 1000), offer(10, 13, 20), offer(None, 13, 1000)
    assert cheapest_route([anchor, patch], held=[], wanted=13) == (anchor, patch)
    assert cheapest_route([anchor, patch, full], held=[], wanted=13) == (full,)


def test_there_is_no_way_to_what_nobody_offers() -> None:
    assert cheapest_route([offer(3, 4, 1)], held=[2], wanted=4) is None


STEPS = st.integers(0, 5)
OFFERS = st.lists(st.builds(offer, st.none() | STEPS, STEPS, st.integers(1, 50)), max_size=9)


@given(offers=OFFERS, held=st.sets(STEPS, max_size=2), wanted=STEPS)
def test_the_route_is_the_cheapest_of_all(offers: list[Offer], held: set[int], wanted: int) -> None:
    found = cheapest_route(offers, held, wanted)
    best = min((route_bytes(route) for route in every_route(offers, held, wanted)), default=None)
    assert (None if found is None else route_bytes(found)) == best
    if found:
        assert found[0].base_step is None or found[0].base_step in held
        assert all(one.step == other.base_step for one, other in itertools.pairwise(found))
        assert found[-1].step == wanted


def every_route(offers: list[Offer], held: set[int], wanted: int) -> list[tuple[Offer, ...]]:
    """Every way without visiting a version twice."""
    routes: list[tuple[Offer, ...]] = [()] if wanted in held else []

    def extend(route: tuple[Offer, ...], at: int | None) -> None:
        for one in offers:
            if one.base_step == at and one not in route:
                longer = (*route, one)
                if one.step == wanted:
                    routes.append(longer)
                elif len(longer) < 7 and one.step not in [leg.step for leg in route]:
                    extend(longer, one.step)

    for start in (None, *held):
        extend((), start)
    return routes
