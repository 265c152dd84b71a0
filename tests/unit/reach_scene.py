"""A node that asks whether it can be dialled, with witnesses and relays that do as a script says, in virtual time."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from scenes import Scene as TestScene
from scenes import make_test

from swarm.config import CoordinatorLink, EntryConfig, ExchangeConfig, NodeConfig
from swarm.errors import Unavailable
from swarm.interfaces import DialBack, PeerAddress, Reservation
from swarm.loops.reach import Reach
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import make_advert, make_identity
from swarm.testing.nodes import make_agent, make_context

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
    """The behaviour of one relay towards this node."""

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


def scene(acts: TestScene) -> TestScene:
    """Makes a test of a coroutine: a scene on a network that does not change."""
    return make_test(acts, lambda act, monkeypatch: play(act, monkeypatch), ("monkeypatch",))


async def keep(reach: Reach, seconds: float) -> None:
    """Runs the loop for so long."""
    try:
        async with asyncio.timeout(seconds):
            await reach.keep()
    except TimeoutError:
        pass


@asynccontextmanager
async def kept(reach: Reach, seconds: float = 0.0) -> AsyncGenerator[None]:
    """While the loop runs, from so many seconds on."""
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(reach.keep())
        await asyncio.sleep(seconds)
        yield
        keeping.cancel()
