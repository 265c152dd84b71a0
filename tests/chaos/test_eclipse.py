"""Nobody is cut off by free adverts: floods of dead and hostile addresses, carried out on the virtual swarm."""

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.config import EntryConfig, NodeConfig
from swarm.exchange.agent import Agent
from swarm.interfaces import StreamItem
from swarm.peers.address_book import KNOWN_PEERS, STRANGERS_BURST, STRANGERS_PER_S, save_known_peers
from swarm.peers.peer_table import Peers
from swarm.peers.topology import rank
from swarm.simulate.virtual.faults import Crash, FaultPlan
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.simulate.virtual.swarm import VirtualSwarm
from swarm.testing.builders import make_advert
from swarm.types import Advert, Cursor, NodeId, StreamFilter

NUM_HOSTILE = 10_000
SEEDS = range(3, 8) if os.environ.get("SWARM_FAULT_PLANS") else (4,)
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

    async def restart_alone(self, index: int, before: Callable[[Agent], None]) -> None:
        """One node starts anew, and the directory names no honest one to it; `before` prepares its agent."""
        make = self.swarm._agent

        def prepared(*arguments: Any) -> Agent:
            agent = make(*arguments)
            before(agent)
            return agent

        blind = self.swarm.identities[index].node_id
        self.swarm.directory.is_parted = lambda: True
        self.swarm.directory.can_see = lambda reader, author: reader != blind or author not in self.honest
        self.swarm._agent = prepared  # type: ignore[method-assign]
        await self.swarm._crash(Crash(node=index, at_s=0.0, down_s=3.0))
        self.num_links.clear()

    def first_with(self, index: int, count: int) -> float:
        """When that node had so many honest links."""
        return min((at_s for at_s, links in self.num_links.items() if links[index] >= count), default=math.inf)

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


def flooded(endpoint: Callable[[int], str], at_s: float) -> Watched:
    async def scene() -> Watched:
        watched = Watched(10, 1, FaultPlan(), 20)

        async def attack() -> None:
            await asyncio.sleep(at_s)
            watched.flood(dead_adverts(NUM_HOSTILE, endpoint))

        await watched.run(attack())
        return watched

    return run(scene)


@pytest.mark.parametrize("endpoint", [pytest.param(one_endpoint, marks=pytest.mark.sweep), many_subnets])
def test_ten_thousand_dead_adverts_cost_nobody_a_link(endpoint: Callable[[int], str]) -> None:
    watched = flooded(endpoint, at_s=20.0)
    assert watched.fewest_from(15.0) == 8
    assert watched.swarm.invariants.hold, watched.swarm.invariants.violations
    assert all(watched.num_wasted(index) <= STRANGERS_BURST + 80 * STRANGERS_PER_S for index in range(10))


# --- what is on the disk and in the manifest -------------------------------------------------------------


@pytest.mark.parametrize("count", [0, NUM_HOSTILE])
def test_a_node_that_starts_again_has_its_links_though_the_directory_names_none_of_them(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / KNOWN_PEERS

    async def scene() -> Watched:
        watched = Watched(10, 2, FaultPlan(), 12)

        async def attack() -> None:
            await asyncio.sleep(10.0)
            watched.flood(dead_adverts(count, many_subnets))
            await asyncio.sleep(8.0)
            save_known_peers(path, watched.swarm.agents[0].address_book.to_remember())
            await watched.restart_alone(0, lambda agent: agent.address_book.restore(path, agent.entry_rule.readmits))

        await watched.run(attack())
        return watched

    assert run(scene).fewest_from(30.0) == 8


@pytest.mark.parametrize("has_anchor", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_a_newcomer_among_ten_thousand_dead_adverts_has_its_links_within_20_s(
    has_anchor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one anchor of the manifest it learns who makes groups; without, and nobody listed, it looks for an hour."""
    monkeypatch.setattr(Peers, "is_in_use", lambda self, policy_id: False)  # no advert is looked at before others

    async def scene() -> Watched:
        watched = Watched(10, 3, FaultPlan(crashes=(Crash(node=0, at_s=0.0, down_s=20.0),)), 20)
        watched.flood(dead_adverts(NUM_HOSTILE, many_subnets))
        anchor = watched.swarm.identities[9].node_id
        plain = watched.swarm._config

        def config(index: int) -> NodeConfig:
            made = plain(index)
            anchors = (f"{anchor}@{anchor[:16]}.memory:1",) if has_anchor or index else ()
            exchange = made.exchange.model_copy(update={"anchors": anchors})
            entry = made.entry if has_anchor else EntryConfig(established="members")
            return made.model_copy(update={"exchange": exchange, "entry": entry})

        watched.swarm._config = config  # type: ignore[method-assign]
        await watched.run()
        return watched

    watched = run(scene)
    if has_anchor:  # it starts at second 20
        assert watched.first_with(0, 4) <= 30.0 and watched.first_with(0, 8) <= 40.0
        assert watched.fewest_from(40.0) == 8
    else:
        assert watched.first_with(0, 4) == math.inf


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
def test_a_listed_newcomer_without_an_anchor_has_four_links_within_5_s_among_ten_thousand_dead_adverts(
    seed: int,
) -> None:
    async def scene() -> Watched:
        watched = Watched(10, seed, FaultPlan(crashes=(Crash(node=0, at_s=0.0, down_s=20.0),)), 8)
        watched.flood(dead_adverts(NUM_HOSTILE, many_subnets))
        plain, entry = watched.swarm._config, EntryConfig(members=tuple(sorted(watched.honest)))
        watched.swarm._config = lambda index: plain(index).model_copy(update={"entry": entry})  # type: ignore[method-assign]
        await watched.run()
        return watched

    assert run(scene).first_with(0, 4) <= 25.0, "it starts at second 20"


# --- hostile nodes that answer ---------------------------------------------------------------------------


class Silent:
    """A live node that takes every stream and sends nothing."""

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]


def test_live_hostile_nodes_whose_ids_rank_first_take_half_of_the_places_at_most() -> None:
    async def scene() -> Watched:
        watched = Watched(10, 4, FaultPlan(), 20)
        target = watched.swarm.identities[0].node_id
        ids = (hashlib.sha256(f"ground {n}".encode()).hexdigest() for n in range(20_000))
        ground = sorted(ids, key=lambda node_id: rank(target, node_id))[:60]

        async def attack() -> None:
            await asyncio.sleep(20.0)
            endpoints = [watched.swarm.network.serve(node_id, Silent()) for node_id in ground]  # type: ignore[arg-type]
            watched.flood([make_advert(i, run_id=RUN, endpoints=(e,)) for i, e in zip(ground, endpoints, strict=True)])

        await watched.run(attack())
        return watched

    watched = run(scene)
    at_target = min(links[0] for at_s, links in watched.num_links.items() if at_s > 60.0)
    assert at_target >= 4 and watched.fewest_from(15.0) >= 4
