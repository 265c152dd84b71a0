"""341 adverts of dead addresses through the real DHT, against real nodes on loopback: nobody loses a link."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from waits import until

from swarm.clock import SystemClock
from swarm.config import DirectoryConfig, ExchangeConfig, NodeConfig
from swarm.exchange.agent import Agent
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.loops import run_agent
from swarm.loops.choose_peers import PeerChoice
from swarm.peers.address_book import KNOWN_PEERS, STRANGERS_BURST, STRANGERS_PER_S, save_known_peers
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.peers.topology import choose_neighbours
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, make_advert
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert, NodeId
from swarm.wire.adverts import seal_advert

pytest.importorskip("hivemind")

NUM_HONEST, NUM_HOSTILE = 6, 341


def without_proof(agent: Agent, adverts: list[Advert], relay: bool, rng: random.Random) -> PeerChoice:
    """Mutation: an advert is enough for a place."""
    addresses = [PeerAddress(node_id=a.node_id, endpoint=a.endpoints[0]) for a in adverts if a.endpoints]
    places = choose_neighbours(agent.node_id, addresses, agent.config.exchange.max_neighbours)
    return PeerChoice(streams={(address, True) for address in places}, trials=[])


class Node:
    """A node without a worker: agent, server, directory and loops."""

    def __init__(self, number: int) -> None:
        self.identity = Identity.create()
        self.number = number
        self.lookups: list[set[NodeId]] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self, bootstrap: tuple[str, ...], before: Callable[[Agent], None] = lambda agent: None) -> "Node":
        clock = SystemClock()
        exchange = ExchangeConfig(lookup_every_s=0.3, advert_every_s=5.0)
        context = make_context(NodeConfig(run_id=TOY_RUN_ID, exchange=exchange), self.identity, clock=clock)
        self.agent = make_agent(context, MemoryGroupStore(clock, 2**26))
        before(self.agent)
        self.transport = GrpcTransport(self.identity, TOY_RUN_ID, exchange, clock)
        self.agent.endpoints = await self.transport.serve(self.agent.streams)
        self.directory = await HivemindDirectory.start(
            self.identity, TOY_RUN_ID, DirectoryConfig(bootstrap=bootstrap), clock, None
        )
        looked = self.directory.lookup

        async def lookup() -> list[Advert]:
            adverts = await looked()
            self.lookups.append({advert.node_id for advert in adverts})
            return adverts

        self.directory.lookup = lookup  # type: ignore[method-assign]
        loops = run_agent(self.agent, self.transport, self.directory, None, random.Random(self.number))
        self._task = asyncio.create_task(loops)
        return self

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.transport.stop()
        await self.directory.stop()


class Swarm:
    """Honest nodes, and an attacker with a DHT peer of its own."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    @property
    def honest(self) -> set[NodeId]:
        return {node.identity.node_id for node in self.nodes}

    def num_links(self, node: Node) -> int:
        return len(node.agent.peers.connected & self.honest)

    async def flood(self) -> None:
        """Stores the adverts at every honest DHT peer, as fast as those check them."""
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID
        from hivemind.p2p import PeerID

        from swarm.peers.dht_calls import forget_late_answers
        from swarm.peers.dht_records import shard_key

        victims = [node.directory.visible_maddrs()[0] for node in self.nodes]
        attacker = await DHTNode.create(initial_peers=[victims[0]], nat_port_map=False, auto_nat=False)
        forget_late_answers(attacker)
        key = DHTID.generate(source=shard_key(TOY_RUN_ID, 0))
        try:
            for number in range(NUM_HOSTILE):
                identity = Identity.create()
                endpoint = f"127.66.{number // 200}.{1 + number % 200}:9"
                until_s = time.time() + 200.0
                advert = make_advert(identity.node_id, run_id=TOY_RUN_ID, endpoints=(endpoint,), expires_at_s=until_s)
                data = seal_advert(advert, identity)
                await asyncio.gather(
                    *(
                        attacker.protocol.call_store(
                            PeerID.from_base58(victim.rpartition("/p2p/")[2]),
                            [key],
                            [data],
                            [until_s],
                            [identity.public_key],
                        )
                        for victim in victims
                    )
                )
        finally:
            await attacker.shutdown()


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    it = Swarm()
    try:
        for number in range(NUM_HONEST):
            bootstrap = it.nodes[0].directory.visible_maddrs() if it.nodes else ()
            it.nodes.append(await Node(number).start(bootstrap))
        await until(lambda: all(it.num_links(node) == NUM_HONEST - 1 for node in it.nodes))
        yield it
    finally:
        for node in it.nodes:
            with contextlib.suppress(Exception):
                await node.stop()


async def test_dead_adverts_in_the_dht_cost_nobody_a_link_and_a_node_that_starts_again_has_all_of_them(
    swarm: Swarm, tmp_path: Path
) -> None:
    began_s, fewest = time.monotonic(), NUM_HONEST

    def is_flooded() -> bool:
        nonlocal fewest
        fewest = min(fewest, *map(swarm.num_links, swarm.nodes))
        return all(len(found - swarm.honest) > 60 for node in swarm.nodes for found in node.lookups[-10:])

    flood = asyncio.create_task(swarm.flood())
    await until(lambda: is_flooded() and flood.done())
    await flood
    for node in swarm.nodes:
        node.lookups.clear()
    await until(lambda: is_flooded() and min(len(node.lookups) for node in swarm.nodes) >= 20)
    assert fewest == NUM_HONEST - 1, "all that there are"
    for node in swarm.nodes:
        most = STRANGERS_BURST + STRANGERS_PER_S * (time.monotonic() - began_s) + 1
        assert node.agent.address_book.num_failed <= most

    # one starts again, at another port, while the directory is flooded
    path, again = tmp_path / KNOWN_PEERS, swarm.nodes[3]
    save_known_peers(path, again.agent.address_book.to_remember())
    await again.stop()
    await again.start(
        swarm.nodes[0].directory.visible_maddrs(),
        lambda agent: agent.address_book.restore(path, agent.entry_rule.readmits),
    )
    await until(lambda: swarm.num_links(again) == NUM_HONEST - 1)
    await until(lambda: all(swarm.num_links(node) == NUM_HONEST - 1 for node in swarm.nodes))


@pytest.mark.sweep
async def test_where_an_advert_is_enough_for_a_place_dead_ones_in_the_dht_cut_nodes_off(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.loops.neighbours.choose_peers", without_proof)
    flood = asyncio.create_task(swarm.flood())
    await until(lambda: sum(map(swarm.num_links, swarm.nodes)) <= NUM_HONEST)
    flood.cancel()
    await asyncio.gather(flood, return_exceptions=True)
