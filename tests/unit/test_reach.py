"""Reach: witnesses and relays that lie, refuse, withhold or vanish, in virtual time; each defence is also taken out."""

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarm.config import CoordinatorLink, EntryConfig, ExchangeConfig, NodeConfig
from swarm.errors import Unavailable
from swarm.interfaces import DialBack, PeerAddress, Reservation
from swarm.loops import agent_loops
from swarm.loops import reach as reach_module
from swarm.loops.reach import LONGEST_CHECK_S, NUM_RESERVATIONS, NUM_WITNESSES, Reach, ReachKind
from swarm.loops.relayed_directory import LOOKUP_EVERY_S
from swarm.peers.address_book import STRANGERS_PER_S, budget_key_of
from swarm.relay.relay_servicer import RECORD_CALLS_PER_S
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import make_advert, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert

COORDINATOR = PeerAddress(node_id=make_identity(2).node_id, endpoint="9.0.0.1:7700")
CONFIGURED = "192.168.1.7:7700"
OWN_HOST = "7.7.7.7"  # as honest witnesses see us


def address_of(number: int, host: str = "") -> PeerAddress:
    return PeerAddress(node_id=make_identity(10 + number).node_id, endpoint=f"{host or f'8.{number}.0.1'}:7700")


def yes(host: str = OWN_HOST) -> DialBack:
    return DialBack(host=host, is_reached=True, detail="")


def no(host: str = OWN_HOST) -> DialBack:
    return DialBack(host=host, is_reached=False, detail="no TLS connection: TimeoutError")


@dataclass(eq=False)
class RelayAtWork:
    """What one relay does with us."""

    gives_reservation: bool = True
    refuses: bool = False
    passes_on: bool = True
    lasts_s: float = math.inf
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0
    num_checks: int = 0


@dataclass(eq=False)
class FakeReservation:
    endpoint: str
    relay: RelayAtWork
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self) -> None:
        self.relay.num_asked += 1
        if self.relay.refuses:
            raise Unavailable("no reservation")
        if self.relay.gives_reservation:
            self.held.set()
        try:
            async with asyncio.timeout(self.relay.lasts_s):
                await self.relay.ended.wait()
        except TimeoutError:
            pass
        finally:
            self.held.clear()
        raise Unavailable("the relay ended it")


class FakeReach:
    """`swarm.interfaces.Reachability`, as a script says."""

    def __init__(self) -> None:
        self.is_dialable = True
        self.answers: dict[PeerAddress, DialBack] = {}
        self.asked: list[PeerAddress] = []
        self.relays: dict[PeerAddress, RelayAtWork] = {}

    async def dial_back(self, peer: PeerAddress, timeout_s: float) -> DialBack:
        self.asked.append(peer)
        if peer not in self.answers:
            raise Unavailable("not there")
        return self.answers[peer]

    def reservation_at(self, relay: PeerAddress) -> FakeReservation:
        reservation = FakeReservation(
            f"{relay.endpoint}/{relay.node_id}", self.relays.setdefault(relay, RelayAtWork(refuses=True))
        )
        return reservation

    async def check_reservation(self, reservation: Reservation, timeout_s: float) -> None:
        assert isinstance(reservation, FakeReservation)
        reservation.relay.num_checks += 1
        if not reservation.relay.passes_on:
            await asyncio.sleep(timeout_s)
            raise Unavailable("nobody got through")

    async def announce_at(self, relay: PeerAddress, advert: bytes) -> None:
        raise Unavailable("no directory")

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        raise Unavailable("no directory")

    async def renew_connections(self) -> None:
        """There are none."""


class Scene:
    """A node with a coordinator, peers that answered it before, and what they say."""

    def __init__(self, *, members: tuple[str, ...] = (), **exchange: Any) -> None:
        link = CoordinatorLink(address=COORDINATOR.endpoint, fingerprint=COORDINATOR.node_id)
        config = NodeConfig(
            exchange=ExchangeConfig(listen="0.0.0.0:7700", **exchange),
            coordinator=link,
            entry=EntryConfig(members=members),
        )
        clock = LoopClock(asyncio.get_running_loop())
        self.agent = make_agent(make_context(config, make_identity(1), clock=clock), MemoryGroupStore(clock, 2**20))
        self.agent.endpoints = (CONFIGURED,)
        self.network = FakeReach()
        self.reach = Reach(self.agent, self.network, random.Random(0), is_advertise_set=False)

    def knows(self, *addresses: PeerAddress, relay: bool = True) -> None:
        """Peers that proved their key there, and say that they relay."""
        for address in addresses:
            self.agent.address_book.record_answer(address)
        reservations = int(relay)
        known = [peer.address for peer in self.agent.address_book.known.values()]
        self.agent.peers.observe(
            [make_advert(each.node_id, endpoints=(each.endpoint,), relay_reservations=reservations) for each in known]
        )

    @property
    def advertised(self) -> set[str]:
        """Endpoints of the relays in the advert, or our own."""
        return {endpoint.partition("/")[0] for endpoint in self.agent.endpoints}


def play(scene: Callable[[], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def network(self: Reach) -> tuple[str, float]:
        return "192.168.1.7", 0.0

    monkeypatch.setattr(Reach, "_network", network)
    run_virtual(scene())


async def keep(reach: Reach, seconds: float) -> None:
    """Runs the loop for so long."""
    try:
        async with asyncio.timeout(seconds):
            await reach.keep()
    except TimeoutError:
        pass


@pytest.mark.parametrize(
    ("listen", "advertise", "kind"),
    [
        ("127.0.0.1:0", "", ReachKind.LOCAL),
        ("127.0.0.1:7700", "example.org:7700", ReachKind.DIALABLE),  # a mapped port leads there
    ],
)
def test_who_listens_on_loopback_alone_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, listen: str, advertise: str, kind: ReachKind
) -> None:
    async def scene() -> None:
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

    play(scene, monkeypatch)


# --- whether we can be dialled -----------------------------------------------------------------------------


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
def test_most_witnesses_decide_and_of_two_the_first(
    said: list[DialBack], kind: ReachKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
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

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: everybody is public"])
def test_who_is_in_our_own_network_is_not_asked_what_the_internet_may_dial(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everybody_is_public(endpoint: str) -> bool:
        return True

    if not is_defended:
        monkeypatch.setattr(reach_module, "is_public", everybody_is_public)

    async def scene() -> None:
        it = Scene()
        near = [address_of(number, f"192.168.1.{20 + number}") for number in range(8)]
        it.knows(*near)
        it.network.answers = {COORDINATOR: no(), **{address: yes("192.168.1.7") for address in near}}
        await it.reach.measure()
        assert (it.reach.state.kind is ReachKind.OUTWARD) is is_defended

    play(scene, monkeypatch)


class FirstCounts(Counter[str]):
    """The defence taken out: what the first witness says is taken."""

    def most_common(self, n: int | None = None) -> list[tuple[str, int]]:
        return [(next(iter(self)), self.total())]


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: the first counts"])
@pytest.mark.parametrize("is_reached", [True, False])
def test_one_witness_that_lies_names_no_address_and_takes_nobody_off_the_network(
    is_reached: bool, is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(reach_module, "Counter", FirstCounts)

    async def scene() -> None:
        it = Scene()
        peers = [address_of(number) for number in range(2)]
        it.knows(*peers)
        lie = DialBack(host="6.6.6.6", is_reached=is_reached, detail="")
        it.network.answers = {COORDINATOR: lie, peers[0]: yes(), peers[1]: yes()}
        await it.reach.measure()
        assert it.reach.state.kind is ReachKind.DIALABLE
        assert it.advertised == {f"{OWN_HOST if is_defended else '6.6.6.6'}:7700"}

    play(scene, monkeypatch)


def test_witnesses_that_name_different_addresses_change_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        it = Scene()
        peers = [address_of(number) for number in range(2)]
        it.knows(*peers)
        it.network.answers = {COORDINATOR: yes(), peers[0]: yes("6.6.6.6"), peers[1]: yes("5.5.5.5")}
        await it.reach.measure()
        assert it.reach.state.kind is ReachKind.DIALABLE and it.advertised == {CONFIGURED}

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: every key is a subnet"])
def test_keys_of_one_subnet_are_one_witness(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def its_own(endpoint: str) -> str:
        return endpoint

    if not is_defended:
        monkeypatch.setattr(reach_module, "budget_key_of", its_own)

    async def scene() -> None:
        it = Scene()
        liars = [address_of(number, f"6.6.6.{number}") for number in range(60)]
        honest = address_of(90)
        it.knows(*liars, honest)
        it.network.answers = {COORDINATOR: yes(), honest: yes(), **{liar: no() for liar in liars}}
        await it.reach.measure()
        assert len(it.network.asked) == NUM_WITNESSES and COORDINATOR in it.network.asked
        assert (it.reach.state.kind is ReachKind.DIALABLE) is is_defended

    play(scene, monkeypatch)


# --- reservations at relays --------------------------------------------------------------------------------------


def outward(*relays: PeerAddress, **changes: Any) -> Scene:
    """A node that cannot be dialled; its peers relay."""
    it = Scene(reach="outward", **changes)
    it.knows(*relays)
    it.network.relays = {relay: RelayAtWork() for relay in (*relays, COORDINATOR)}
    return it


def test_reservations_are_held_at_relays_of_different_subnets_and_advertised_while_they_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        relays = [address_of(0, "8.0.0.1"), address_of(1, "8.0.0.2"), address_of(2)]
        it = outward(*relays)
        await it.reach.measure()
        assert it.advertised == set(), "nothing leads to us yet"
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(5.0)
            assert len(it.advertised) == NUM_RESERVATIONS and relays[2].endpoint in it.advertised
            assert {relay.endpoint for relay in it.agent.address_book.relays} == it.advertised
            lost = next(relay for relay in relays if relay.endpoint in it.advertised)
            it.network.relays[lost].ended.set()
            it.network.relays[lost].refuses = True
            await asyncio.sleep(0.01)
            assert it.advertised == it.advertised - {lost.endpoint}, "at once"
            await asyncio.sleep(5.0)
            assert len(it.advertised) == NUM_RESERVATIONS and lost.endpoint not in it.advertised
            keeping.cancel()

    play(scene, monkeypatch)


def advertise(it: Scene, *strangers: PeerAddress) -> None:
    """Adverts of relays that never answered this node, beside those of the peers that did."""
    known = [peer.address for peer in it.agent.address_book.known.values()]
    adverts = [make_advert(each.node_id, endpoints=(each.endpoint,), relay_reservations=1) for each in known]
    adverts += [make_advert(each.node_id, endpoints=(each.endpoint,), relay_reservations=1) for each in strangers]
    it.agent.peers.observe(adverts)


def test_where_all_known_relays_are_full_strangers_are_asked_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
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
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            while not it.advertised:
                await asyncio.sleep(0.1)
                assert sum(address in strangers for address in it.reach._relays) <= 1
            assert it.advertised == {strangers[0].endpoint}
            assert strangers[0].node_id in it.agent.address_book.known
            keeping.cancel()

    play(scene, monkeypatch)


def test_strangers_are_not_asked_while_those_that_answered_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        it = outward(address_of(0))
        stranger = address_of(20, "9.0.0.1")
        advertise(it, stranger)
        await it.reach.measure()
        await keep(it.reach, 60.0)
        assert stranger not in it.network.relays

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: without a bound of its own"])
def test_adverts_of_dead_relays_leave_dials_for_neighbours(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_defended:
        monkeypatch.setattr(reach_module, "RELAYS_PER_S", 1e6)

    async def scene() -> None:
        it = outward()
        it.network.relays[COORDINATOR].refuses = True
        advertise(it, *(address_of(number, f"9.{number}.0.1") for number in range(300)))
        await it.reach.measure()
        await keep(it.reach, 120.0)  # the burst is used up by then
        others, num_dials = (address_of(number, f"7.{number // 256}.{number % 256}.1") for number in range(2**16)), 0
        for _ in range(10):  # look-ups, at each of which strangers are tried as neighbours
            await keep(it.reach, 30.0)
            num_dials += sum(1 for _ in itertools.takewhile(it.agent.address_book.begin_dial, others))
        assert (num_dials >= 0.4 * 300 * STRANGERS_PER_S) is is_defended, num_dials

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: every key is a subnet"])
def test_adverts_of_one_subnet_do_not_keep_a_node_from_relays_of_others(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def its_own(endpoint: str) -> str:
        return endpoint

    if not is_defended:
        monkeypatch.setattr(reach_module, "budget_key_of", its_own)

    async def scene() -> None:
        it, honest = outward(), address_of(3000, "9.9.9.9")
        it.network.relays = {COORDINATOR: RelayAtWork(refuses=True), honest: RelayAtWork()}
        advertise(it, honest, *(address_of(number, f"6.6.6.{number % 256}") for number in range(1000)))
        await it.reach.measure()
        await keep(it.reach, 120.0)
        assert (it.network.relays[honest].num_asked == 1) is is_defended

    play(scene, monkeypatch)


async def nothing_to_check(self: FakeReach, reservation: Reservation, timeout_s: float) -> None:
    """The defence taken out: a relay is believed."""


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: nothing to check"])
def test_relays_that_accept_reservations_and_pass_nothing_on_are_not_advertised(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(FakeReach, "check_reservation", nothing_to_check)

    async def scene() -> None:
        hostile = [address_of(number) for number in range(2)]
        it = outward(*hostile)
        for relay in hostile:
            it.network.relays[relay].passes_on = False
        await it.reach.measure()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(10.0)
            assert (it.advertised == {COORDINATOR.endpoint}) is is_defended
            keeping.cancel()

    play(scene, monkeypatch)


def test_a_relay_that_led_here_is_checked_less_and_less_often_and_left_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        relay = address_of(0)
        it = outward(relay)
        await it.reach.measure()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(3600.0)
            assert 3600 / LONGEST_CHECK_S < it.network.relays[relay].num_checks < 22, "every 480 s at the rarest"
            it.network.relays[relay].passes_on = False
            await asyncio.sleep(LONGEST_CHECK_S + 10.0)
            assert it.advertised == {COORDINATOR.endpoint}
            keeping.cancel()

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: without a deadline"])
def test_relays_that_never_say_that_a_reservation_is_held_make_room_for_others(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(reach_module, "HELD_TIMEOUT_S", math.inf)

    async def scene() -> None:
        hostile = [address_of(number) for number in range(2)]
        it = outward(*hostile)
        for relay in hostile:
            it.network.relays[relay].gives_reservation = False
        await it.reach.measure()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(15.0)
            assert (it.advertised == {COORDINATOR.endpoint}) is is_defended
            keeping.cancel()

    play(scene, monkeypatch)


def test_relays_that_refuse_for_a_day_are_asked_once_a_minute_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_module, "LOOK_EVERY_S", 20.0)

    async def scene() -> None:
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

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: all are asked first"])
@pytest.mark.parametrize(
    "hostile",
    [{"gives_reservation": False}, {"passes_on": False}, {"lasts_s": 0.5}],
    ids=["never held", "passes nothing on", "soon lost"],
)
def test_relays_of_free_keys_that_lead_nowhere_do_not_keep_a_node_from_its_coordinator(
    hostile: dict[str, Any], is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(reach_module, "MAX_IN_VAIN", math.inf)

    async def scene() -> None:
        relays = [address_of(number) for number in range(100)]
        it = outward(*relays)
        for relay in relays:
            it.network.relays[relay] = RelayAtWork(**hostile)
        await it.reach.measure()
        await keep(it.reach, 600.0)
        assert (it.network.relays[COORDINATOR].num_asked == 1) is is_defended

    play(scene, monkeypatch)


@dataclass
class Announced:
    """A directory that counts what it is told."""

    num: int = 0

    async def announce(self, advert: Advert) -> None:
        self.num += 1


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: every change is news"])
def test_relays_that_take_and_drop_reservations_do_not_have_a_node_announce_on_and_on(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(agent_loops, "CHANGES_PER_S", 1e6)

    async def scene() -> None:
        relays, announced = [address_of(number) for number in range(100)], Announced()
        it = outward(*relays)
        for relay in relays:
            it.network.relays[relay] = RelayAtWork(lasts_s=0.5)
        await it.reach.measure()
        announcing = asyncio.ensure_future(agent_loops.announce_loop(it.agent, announced, random.Random(0)))  # type: ignore[arg-type]
        await keep(it.reach, 600.0)
        announcing.cancel()
        # a relay takes one of these calls of a node every two seconds, and refuses all where there are more
        is_heard = announced.num + 600 / LOOKUP_EVERY_S < 600 * RECORD_CALLS_PER_S
        assert is_heard is is_defended, announced.num

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: every key is a subnet"])
def test_many_keys_of_one_subnet_do_not_have_both_reservations(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def its_own(endpoint: str) -> str:
        return endpoint

    if not is_defended:
        monkeypatch.setattr(reach_module, "budget_key_of", its_own)

    async def scene() -> None:
        hostile = [address_of(number, f"6.6.6.{number}") for number in range(40)]
        it = outward(*hostile, *map(address_of, range(50, 53)))
        await it.reach.measure()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(5.0)
            assert len(it.advertised) == NUM_RESERVATIONS
            assert (len({budget_key_of(endpoint) for endpoint in it.advertised}) == NUM_RESERVATIONS) is is_defended
            keeping.cancel()

    play(scene, monkeypatch)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: all are alike"])
def test_established_relays_come_before_those_of_free_keys(is_defended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        strangers, members = [[address_of(number) for number in numbers] for numbers in (range(40), range(50, 52))]
        it = outward(*strangers, *members, members=tuple(member.node_id for member in members))
        if not is_defended:
            monkeypatch.setattr(it.agent, "standing", lambda node_id: 0)
        await it.reach.measure()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(1.0)
            assert (it.advertised == {member.endpoint for member in members}) is is_defended
            keeping.cancel()

    play(scene, monkeypatch)


def test_a_node_that_can_be_dialled_again_gives_its_reservations_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        it = Scene()
        relay = address_of(0)
        it.knows(relay)
        it.network.relays = {relay: RelayAtWork(), COORDINATOR: RelayAtWork()}
        it.network.answers = {COORDINATOR: no()}
        await it.reach.measure()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            await asyncio.sleep(5.0)
            assert it.advertised == {relay.endpoint, COORDINATOR.endpoint} and it.reach.helpers
            it.network.answers = {COORDINATOR: yes()}
            await asyncio.sleep(reach_module.MEASURE_EVERY_S + 5.0)
            assert it.advertised == {f"{OWN_HOST}:7700"} and not it.reach.helpers
            assert not it.agent.address_book.relays
            keeping.cancel()

    play(scene, monkeypatch)


def test_after_hours_of_sleep_and_with_another_address_connections_begin_anew_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
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
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(it.reach.keep())
            for now in (("192.168.1.7", 8 * 3600.0), ("10.0.0.9", 8 * 3600.0)):
                await asyncio.sleep(60.0)
                num_asked, began_s, seen = len(it.network.asked), it.agent.clock.monotonic_s(), now
                await asyncio.sleep(5.0)
                assert renewed_s[-1] - began_s <= reach_module.LOOK_EVERY_S
                assert len(it.network.asked) == num_asked + 1, "whether others can dial it is asked again"
            assert len(renewed_s) == 2
            keeping.cancel()

    play(scene, monkeypatch)
