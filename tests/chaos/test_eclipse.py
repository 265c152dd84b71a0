"""Nobody is cut off by free adverts: floods of dead and hostile addresses, carried out on the virtual swarm."""

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from swarm.exchange.agent import Agent
from swarm.interfaces import PeerAddress
from swarm.loops.choose_peers import PeerChoice
from swarm.peers.address_book import STRANGERS_BURST, STRANGERS_PER_S
from swarm.peers.topology import choose_neighbours
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.simulate.virtual.swarm import VirtualSwarm
from swarm.testing.builders import make_advert
from swarm.types import Advert

NUM_HOSTILE = 10_000
RUN = "virtual"


def dead_adverts(count: int, endpoint: Callable[[int], str]) -> list[Advert]:
    """Of fresh keys that nobody answers for."""
    return [
        make_advert(hashlib.sha256(f"dead {n}".encode()).hexdigest(), run_id=RUN, endpoints=(endpoint(n),))
        for n in range(count)
    ]


def one_endpoint(number: int) -> str:
    return "198.51.100.7:22"


def one_subnet(number: int) -> str:
    return f"8.8.8.{number % 256}:{1 + number}"


def many_subnets(number: int) -> str:
    return f"{11 + number % 100}.{number // 100 % 256}.{number % 7}.9:7700"


def many_names(number: int) -> str:
    return f"n{number}.example.org:7700"


class Watched:
    """A virtual swarm with a directory full of hostile adverts, and what its nodes do about them."""

    def __init__(self, num_nodes: int, seed: int, plan: FaultPlan, num_rounds: int) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.swarm = VirtualSwarm(num_nodes, seed, num_rounds, plan, self.clock)
        self.swarm.scale = replace(self.swarm.scale, max_neighbours=8)
        self.honest = {identity.node_id for identity in self.swarm.identities}
        self.num_links: dict[float, list[int]] = {}  # virtual second -> honest links of each node

    def flood(self, adverts: list[Advert]) -> None:
        directory = self.swarm.directory
        directory.adverts = dict(sorted({**directory.adverts, **{(RUN, a.node_id): a for a in adverts}}.items()))

    async def run(self, *acts: Coroutine[Any, Any, None]) -> None:
        tasks = [asyncio.create_task(act) for act in (self._sample(), *acts)]
        try:
            await self.swarm.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.num_links[self.clock.monotonic_s()] = [
                len(agent.peers.connected & self.honest) for _, agent in sorted(self.swarm.agents.items())
            ]

    def fewest_from(self, at_s: float) -> int:
        return min(min(links) for when_s, links in self.num_links.items() if when_s >= at_s)

    def num_wasted(self, index: int) -> int:
        return self.swarm.agents[index].address_book.num_failed


def run(scene: Callable[[], Coroutine[Any, Any, Watched]]) -> Watched:
    return run_virtual(scene())


# --- adverts of dead endpoints ---------------------------------------------------------------------------


def without_proof(agent: Agent, adverts: list[Advert], rng: random.Random) -> PeerChoice:
    """Mutation: an advert is enough for a place."""
    addresses = [PeerAddress(node_id=a.node_id, endpoint=a.endpoints[0]) for a in adverts if a.endpoints]
    places = choose_neighbours(agent.node_id, addresses, agent.config.exchange.max_neighbours)
    return PeerChoice(streams={(address, True) for address in places}, trials=[])


def flooded(endpoint: Callable[[int], str], at_s: float) -> Watched:
    async def scene() -> Watched:
        watched = Watched(10, 1, FaultPlan(), 20)

        async def attack() -> None:
            await asyncio.sleep(at_s)
            watched.flood(dead_adverts(NUM_HOSTILE, endpoint))

        await watched.run(attack())
        return watched

    return run(scene)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("endpoint", [one_endpoint, many_subnets])
def test_ten_thousand_dead_adverts_cost_nobody_a_link(endpoint: Callable[[int], str]) -> None:
    watched = flooded(endpoint, at_s=20.0)
    assert watched.fewest_from(15.0) == 8
    assert watched.swarm.invariants.hold, watched.swarm.invariants.violations
    assert all(watched.num_wasted(index) <= STRANGERS_BURST + 80 * STRANGERS_PER_S for index in range(10))


@pytest.mark.timeout(300)
def test_where_an_advert_is_enough_for_a_place_dead_ones_cut_everybody_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.loops.neighbours.choose_peers", without_proof)
    watched = flooded(many_subnets, at_s=20.0)
    assert watched.fewest_from(15.0) == 0
