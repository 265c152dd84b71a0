"""Reachability of a node: witnesses that lie or differ, another network, hours of sleep."""

import asyncio
import logging
import random

import pytest

from swarm.config import ExchangeConfig, NodeConfig
from swarm.interfaces import DialBack
from swarm.loops import reach as reach_module
from swarm.loops.reach import NUM_WITNESSES, Reach, ReachKind
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock
from swarm.testing.builders import make_identity
from swarm.testing.nodes import make_agent, make_context

from .reach_scene import (
    CONFIGURED,
    COORDINATOR,
    OWN_HOST,
    FakeReach,
    RelayAtWork,
    Scene,
    address_of,
    keep,
    kept,
    no,
    play,
    scene,
    yes,
)


@pytest.mark.parametrize(
    ("listen", "advertise", "kind"),
    [
        ("127.0.0.1:0", "", ReachKind.LOCAL),
        ("127.0.0.1:7700", "example.org:7700", ReachKind.DIALABLE),  # a mapped port leads there
    ],
)
@scene
async def test_who_listens_on_loopback_alone_asks_nobody(listen: str, advertise: str, kind: ReachKind) -> None:
    config = NodeConfig(exchange=ExchangeConfig(listen=listen, advertise=advertise))
    clock = LoopClock(asyncio.get_running_loop())
    agent = make_agent(make_context(config, make_identity(1), clock=clock), MemoryGroupStore(clock, 2**20))
    agent.endpoints = (advertise or listen,)
    network = FakeReach()
    reach = Reach(agent, network, random.Random(0), is_advertise_set=bool(advertise))
    await reach.measure()
    assert reach.state.kind is kind and network.is_dialable and not network.asked
    began_s = clock.monotonic_s()
    await keep(reach, 60.0)
    assert (clock.monotonic_s() == began_s) is (kind is ReachKind.LOCAL), "its network does not matter"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ([yes(), yes(), no()], ReachKind.DIALABLE),
        ([no(), no(), yes()], ReachKind.OUTWARD),
        ([yes(), no()], ReachKind.DIALABLE),  # the coordinator decides
        ([no(), yes()], ReachKind.OUTWARD),
        ([no()], ReachKind.OUTWARD),
        ([], ReachKind.UNKNOWN),
    ],
)
@scene
async def test_most_witnesses_decide_and_of_two_the_first(said: list[DialBack], kind: ReachKind) -> None:
    it = Scene()
    peers = [address_of(number) for number in range(2)]
    it.knows(*peers)
    it.network.answers = dict(zip([COORDINATOR, *peers], said, strict=False))
    await it.reach.measure()
    assert it.reach.state.kind is kind
    assert it.network.is_dialable is (kind is not ReachKind.OUTWARD)
    expected = {
        ReachKind.DIALABLE: {f"{OWN_HOST}:7700"},
        ReachKind.OUTWARD: set[str](),
        ReachKind.UNKNOWN: {CONFIGURED},
    }
    assert it.advertised == expected[kind]


@scene
async def test_who_is_in_our_own_network_is_not_asked_what_the_internet_may_dial() -> None:
    it = Scene()
    near = [address_of(number, f"192.168.1.{20 + number}") for number in range(8)]
    it.knows(*near)
    it.network.answers = {COORDINATOR: no(), **{address: yes("192.168.1.7") for address in near}}
    await it.reach.measure()
    assert it.reach.state.kind is ReachKind.OUTWARD


@pytest.mark.parametrize("is_reached", [True, False])
@scene
async def test_one_witness_that_lies_names_no_address_and_takes_nobody_off_the_network(is_reached: bool) -> None:
    it = Scene()
    peers = [address_of(number) for number in range(2)]
    it.knows(*peers)
    lie = DialBack(host="6.6.6.6", is_reached=is_reached, detail="")
    it.network.answers = {COORDINATOR: lie, peers[0]: yes(), peers[1]: yes()}
    await it.reach.measure()
    assert it.reach.state.kind is ReachKind.DIALABLE
    assert it.advertised == {f"{OWN_HOST}:7700"}


@pytest.mark.parametrize("answer", [yes(), no()])
def test_a_node_that_says_that_it_is_dialled_is_tried_and_stays_so(
    answer: DialBack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that dialled it leads others there, whose network lets out one port; nobody can take it away."""

    async def scene() -> None:
        it = Scene(reach="dialable")
        it.network.answers = {COORDINATOR: answer}
        await it.reach.measure()
        assert it.network.asked == [COORDINATOR] and it.reach.state.detail == answer.detail
        await it.reach.measure()
        assert it.reach.state.kind is ReachKind.DIALABLE and it.advertised == {CONFIGURED}

    play(scene, monkeypatch)
    levels = [record.levelno for record in caplog.records if record.name == reach_module.__name__]
    assert levels.count(logging.WARNING) == (not answer.is_reached), "once"


@scene
async def test_a_node_that_says_that_it_is_not_dialled_asks_nobody() -> None:
    it = Scene(reach="outward")
    it.network.answers = {COORDINATOR: yes()}
    await it.reach.measure()
    assert not it.network.asked and it.reach.state.kind is ReachKind.OUTWARD


@scene
async def test_witnesses_that_name_different_addresses_change_none() -> None:
    it = Scene()
    peers = [address_of(number) for number in range(2)]
    it.knows(*peers)
    it.network.answers = {COORDINATOR: yes(), peers[0]: yes("6.6.6.6"), peers[1]: yes("5.5.5.5")}
    await it.reach.measure()
    assert it.reach.state.kind is ReachKind.DIALABLE and it.advertised == {CONFIGURED}


@scene
async def test_keys_of_one_subnet_are_one_witness() -> None:
    it = Scene()
    liars = [address_of(number, f"6.6.6.{number}") for number in range(60)]
    honest = address_of(90)
    it.knows(*liars, honest)
    it.network.answers = {COORDINATOR: yes(), honest: yes(), **{liar: no() for liar in liars}}
    await it.reach.measure()
    assert len(it.network.asked) == NUM_WITNESSES and COORDINATOR in it.network.asked
    assert it.reach.state.kind is ReachKind.DIALABLE


@scene
async def test_a_node_that_can_be_dialled_again_gives_its_reservations_back() -> None:
    it = Scene()
    relay = address_of(0)
    it.knows(relay)
    it.network.relays = {relay: RelayAtWork(), COORDINATOR: RelayAtWork()}
    it.network.answers = {COORDINATOR: no()}
    await it.reach.measure()
    async with kept(it.reach, 5.0):
        assert it.advertised == {relay.endpoint, COORDINATOR.endpoint} and it.reach.helpers
        it.network.answers = {COORDINATOR: yes()}
        await asyncio.sleep(reach_module.MEASURE_EVERY_S + 5.0)
        assert it.advertised == {f"{OWN_HOST}:7700"} and not it.reach.helpers
        assert not it.agent.address_book.relays


@scene
async def test_after_hours_of_sleep_and_with_another_address_connections_begin_anew_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Scene()
    it.network.answers = {COORDINATOR: yes()}
    seen = ("192.168.1.7", 0.0)
    renewed_s: list[float] = []

    async def network(self: Reach) -> tuple[str, float]:
        return seen

    async def renew() -> None:
        renewed_s.append(it.agent.clock.monotonic_s())

    monkeypatch.setattr(Reach, "_network", network)
    monkeypatch.setattr(it.network, "renew_connections", renew)
    await it.reach.measure()
    async with kept(it.reach):
        for now in (("192.168.1.7", 8 * 3600.0), ("10.0.0.9", 8 * 3600.0)):
            await asyncio.sleep(60.0)
            num_asked, began_s, seen = len(it.network.asked), it.agent.clock.monotonic_s(), now
            await asyncio.sleep(5.0)
            assert renewed_s[-1] - began_s <= reach_module.LOOK_EVERY_S
            assert len(it.network.asked) == num_asked + 1, "whether others can dial it is asked again"
        assert len(renewed_s) == 2
