"""At which relays a node holds reservations: those that refuse, withhold, vanish, or are many keys of one owner."""

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

from swarm.interfaces import PeerAddress
from swarm.loops import agent_loops
from swarm.loops import reach as reach_module
from swarm.loops.reach import LONGEST_CHECK_S, NUM_RESERVATIONS
from swarm.loops.relayed_directory import LOOKUP_EVERY_S
from swarm.peers.address_book import STRANGERS_PER_S, budget_key_of
from swarm.relay.relay_servicer import RECORD_CALLS_PER_S
from swarm.testing.builders import make_advert
from swarm.types import Advert

from .reach_scene import COORDINATOR, RelayAtWork, Scene, address_of, keep, kept, scene


def outward(*relays: PeerAddress, **changes: Any) -> Scene:
    """A node that cannot be dialled; its peers relay."""
    it = Scene(reach="outward", **changes)
    it.knows(*relays)
    it.network.relays = {relay: RelayAtWork() for relay in (*relays, COORDINATOR)}
    return it


@scene
async def test_reservations_are_held_at_relays_of_different_subnets_and_advertised_while_they_are_held() -> None:
    relays = [address_of(0, "8.0.0.1"), address_of(1, "8.0.0.2"), address_of(2)]
    it = outward(*relays)
    await it.reach.measure()
    assert it.advertised == set(), "nothing leads to us yet"
    async with kept(it.reach, 5.0):
        assert len(it.advertised) == NUM_RESERVATIONS and relays[2].endpoint in it.advertised
        assert {relay.endpoint for relay in it.agent.address_book.relays} == it.advertised
        lost = next(relay for relay in relays if relay.endpoint in it.advertised)
        it.network.relays[lost].ended.set()
        it.network.relays[lost].refuses = True
        await asyncio.sleep(0.01)
        assert it.advertised == it.advertised - {lost.endpoint}, "at once"
        await asyncio.sleep(5.0)
        assert len(it.advertised) == NUM_RESERVATIONS and lost.endpoint not in it.advertised


def advertise(it: Scene, *strangers: PeerAddress) -> None:
    """Adverts of relays that never answered this node, beside those of the peers that did."""
    known = [peer.address for peer in it.agent.address_book.known.values()]
    adverts = [make_advert(each.node_id, endpoints=(each.endpoint,), relay_reservations=1) for each in known]
    adverts += [make_advert(each.node_id, endpoints=(each.endpoint,), relay_reservations=1) for each in strangers]
    it.agent.peers.observe(adverts)


@scene
async def test_where_all_known_relays_are_full_strangers_are_asked_one_at_a_time() -> None:
    known = [address_of(number) for number in range(3)]
    it = outward(*known)
    for relay in (*known, COORDINATOR):
        it.network.relays[relay].refuses = True
    strangers = [address_of(number, f"9.0.{number}.1") for number in range(20, 28)]
    for relay in strangers[1:]:
        it.network.relays[relay] = RelayAtWork(gives_reservation=False)
    it.network.relays[strangers[0]] = RelayAtWork()
    advertise(it, *strangers)
    await it.reach.measure()
    async with kept(it.reach):
        while not it.advertised:
            await asyncio.sleep(0.1)
            assert sum(address in strangers for address in it.reach._relays) <= 1
        assert it.advertised == {strangers[0].endpoint}
        assert strangers[0].node_id in it.agent.address_book.known


@scene
async def test_strangers_are_not_asked_while_those_that_answered_have_room() -> None:
    it = outward(address_of(0))
    stranger = address_of(20, "9.0.0.1")
    advertise(it, stranger)
    await it.reach.measure()
    await keep(it.reach, 60.0)
    assert stranger not in it.network.relays


@scene
async def test_adverts_of_dead_relays_leave_dials_for_neighbours() -> None:
    it = outward()
    it.network.relays[COORDINATOR].refuses = True
    advertise(it, *(address_of(number, f"9.{number}.0.1") for number in range(300)))
    await it.reach.measure()
    await keep(it.reach, 120.0)  # the burst is used up by then
    others, num_dials = (address_of(number, f"7.{number // 256}.{number % 256}.1") for number in range(2**16)), 0
    for _ in range(10):  # look-ups, at each of which strangers are tried as neighbours
        await keep(it.reach, 30.0)
        num_dials += sum(1 for _ in itertools.takewhile(it.agent.address_book.begin_dial, others))
    assert num_dials >= 0.4 * 300 * STRANGERS_PER_S


@scene
async def test_adverts_of_one_subnet_do_not_keep_a_node_from_relays_of_others() -> None:
    it, honest = outward(), address_of(3000, "9.9.9.9")
    it.network.relays = {COORDINATOR: RelayAtWork(refuses=True), honest: RelayAtWork()}
    advertise(it, honest, *(address_of(number, f"6.6.6.{number % 256}") for number in range(1000)))
    await it.reach.measure()
    await keep(it.reach, 120.0)
    assert it.network.relays[honest].num_asked == 1


@pytest.mark.parametrize(
    "hostile", [{"passes_on": False}, {"gives_reservation": False}], ids=["passes nothing on", "never held"]
)
@scene
async def test_relays_that_do_not_lead_here_are_not_advertised_and_make_room(hostile: dict[str, Any]) -> None:
    relays = [address_of(number) for number in range(2)]
    it = outward(*relays)
    for relay in relays:
        it.network.relays[relay] = RelayAtWork(**hostile)
    await it.reach.measure()
    async with kept(it.reach, 15.0):
        assert it.advertised == {COORDINATOR.endpoint}


@scene
async def test_a_relay_that_led_here_is_checked_less_and_less_often_and_left_when_it_does_not() -> None:
    relay = address_of(0)
    it = outward(relay)
    await it.reach.measure()
    async with kept(it.reach, 3600.0):
        assert 3600 / LONGEST_CHECK_S < it.network.relays[relay].num_checks < 22, "every 480 s at the rarest"
        it.network.relays[relay].passes_on = False
        await asyncio.sleep(LONGEST_CHECK_S + 10.0)
        assert it.advertised == {COORDINATOR.endpoint}


@scene
async def test_relays_that_refuse_for_a_day_are_asked_once_a_minute_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach_module, "LOOK_EVERY_S", 20.0)
    relay = address_of(0)
    it = outward(relay)
    for each in it.network.relays.values():
        each.refuses = True
    await it.reach.measure()
    await keep(it.reach, 86_400.0)
    assert 1024 < it.network.relays[relay].num_asked < 3000
    it.network.relays[relay].refuses = False
    await keep(it.reach, 90.0)
    assert it.network.relays[relay].num_asked > 0


@pytest.mark.parametrize(
    "hostile",
    [{"gives_reservation": False}, {"passes_on": False}, {"lasts_s": 0.5}],
    ids=["never held", "passes nothing on", "soon lost"],
)
@scene
async def test_relays_of_free_keys_that_lead_nowhere_do_not_keep_a_node_from_its_coordinator(
    hostile: dict[str, Any],
) -> None:
    relays = [address_of(number) for number in range(100)]
    it = outward(*relays)
    for relay in relays:
        it.network.relays[relay] = RelayAtWork(**hostile)
    await it.reach.measure()
    await keep(it.reach, 600.0)
    assert it.network.relays[COORDINATOR].num_asked == 1


@dataclass
class Announced:
    """A directory that counts what it is told."""

    num: int = 0

    async def announce(self, advert: Advert) -> None:
        self.num += 1


@scene
async def test_relays_that_take_and_drop_reservations_do_not_have_a_node_announce_on_and_on() -> None:
    relays, announced = [address_of(number) for number in range(100)], Announced()
    it = outward(*relays)
    for relay in relays:
        it.network.relays[relay] = RelayAtWork(lasts_s=0.5)
    await it.reach.measure()
    announcing = asyncio.ensure_future(agent_loops.announce_loop(it.agent, announced, random.Random(0)))  # type: ignore[arg-type]
    await keep(it.reach, 600.0)
    announcing.cancel()
    # a relay takes one of these calls of a node every two seconds, and refuses all where there are more
    assert announced.num + 600 / LOOKUP_EVERY_S < 600 * RECORD_CALLS_PER_S


@scene
async def test_many_keys_of_one_subnet_do_not_have_both_reservations() -> None:
    hostile = [address_of(number, f"6.6.6.{number}") for number in range(40)]
    it = outward(*hostile, *map(address_of, range(50, 53)))
    await it.reach.measure()
    async with kept(it.reach, 5.0):
        advertised = it.advertised
    assert len(advertised) == NUM_RESERVATIONS == len(set(map(budget_key_of, advertised)))


@scene
async def test_established_relays_come_before_those_of_free_keys() -> None:
    strangers, members = [[address_of(number) for number in numbers] for numbers in (range(40), range(50, 52))]
    it = outward(*strangers, *members, members=tuple(member.node_id for member in members))
    await it.reach.measure()
    async with kept(it.reach, 1.0):
        advertised = it.advertised
    assert advertised == {member.endpoint for member in members}
