"""Adverts that name a third party's address: what real nodes send there is bounded, whoever claims it and how often."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from waits import until

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig, NodeConfig
from swarm.exchange.agent import Agent
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.loops.dial import dial
from swarm.loops.neighbours import neighbours_loop
from swarm.peers.address_book import STRANGERS_BURST
from swarm.relay.relaying_transport import RelayingTransport
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, make_advert, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert


class Victim:
    """A server of somebody else on several ports, which counts who calls and ends every call."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self.num_calls = 0
        self.most_bytes = 0
        self._servers: list[asyncio.Server] = []

    async def start(self, num_ports: int) -> None:
        for _ in range(num_ports):
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_calls += 1
        self.most_bytes = max(self.most_bytes, len(await reader.read(10_000)))
        writer.close()

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
            await server.wait_closed()


@pytest.fixture
async def victim() -> AsyncIterator[Victim]:
    it = Victim()
    yield it
    await it.stop()


class Directory:
    """A directory in memory that counts how often it was asked."""

    def __init__(self, adverts: list[Advert]) -> None:
        self.adverts, self.num_lookups = adverts, 0

    async def lookup(self) -> list[Advert]:
        self.num_lookups += 1
        return self.adverts


def real_node(identity: Identity) -> tuple[Agent, RelayingTransport]:
    exchange, clock = ExchangeConfig(lookup_every_s=0.02), SystemClock()
    context = make_context(NodeConfig(run_id=TOY_RUN_ID, exchange=exchange), identity, clock=clock)
    return make_agent(context, MemoryGroupStore(clock, 2**26)), RelayingTransport(identity, TOY_RUN_ID, exchange, clock)


def claims(count: int, endpoint: Callable[[int], str]) -> list[Advert]:
    return [make_advert(make_identity(100 + n).node_id, endpoints=(endpoint(n),)) for n in range(count)]


@asynccontextmanager
async def looking(
    agent: Agent, transport: RelayingTransport, adverts: list[Advert], num_lookups: int
) -> AsyncGenerator[None, None]:
    """The node's loop beside a directory; the body runs after so many look-ups."""
    directory = Directory(adverts)
    loop = asyncio.create_task(neighbours_loop(agent, transport, directory, random.Random(0)))  # type: ignore[arg-type]
    try:
        while directory.num_lookups < num_lookups:  # noqa: ASYNC110 - the loop asks it
            await asyncio.sleep(0.02)
        yield
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await transport.stop()


async def test_a_thousand_claims_to_one_address_cost_it_a_few_calls(victim: Victim) -> None:
    await victim.start(1)
    agent, transport = real_node(make_identity(1))
    async with looking(agent, transport, claims(1000, lambda n: f"127.0.0.1:{victim.ports[0]}"), num_lookups=60):
        pass
    assert victim.most_bytes < 2000, "a TLS greeting, and nothing that the attacker chose"
    assert victim.num_calls <= 3


async def test_claims_to_many_ports_of_one_machine_cost_it_the_burst_of_one_node(victim: Victim) -> None:
    await victim.start(100)
    agent, transport = real_node(make_identity(1))
    async with looking(agent, transport, claims(100, lambda n: f"127.0.0.1:{victim.ports[n]}"), num_lookups=40):
        pass
    assert victim.num_calls <= STRANGERS_BURST + 10


async def test_a_thousand_claims_to_a_live_nodes_address_lead_to_that_node() -> None:
    """One call finds out whose address it is; then nobody else's claim to it is tried, and its owner is linked."""
    owner, server = real_node(make_identity(2))
    (endpoint,) = await server.serve(owner.streams)
    agent, transport = real_node(make_identity(1))
    async with looking(agent, transport, claims(1000, lambda n: endpoint), num_lookups=60):
        assert agent.peers.connected == {owner.node_id}
        assert agent.address_book.num_failed <= 8
    await server.stop()


async def test_who_claims_an_address_of_another_node_gets_nothing_sent_there(victim: Victim) -> None:
    """A peer that proved itself and then moves to a third party's address keeps its old link, and no more."""
    owner, server = real_node(make_identity(2))
    (endpoint,) = await server.serve(owner.streams)
    await victim.start(1)
    agent, transport = real_node(make_identity(1))
    client = await dial(agent, transport, PeerAddress(node_id=owner.node_id, endpoint=endpoint))
    await client.close()
    moved = [make_advert(owner.node_id, endpoints=(f"127.0.0.1:{victim.ports[0]}",))]
    async with looking(agent, transport, moved, num_lookups=60):
        assert agent.peers.connected == {owner.node_id} and victim.num_calls <= 3
    await server.stop()


async def test_claims_to_a_nodes_own_address_do_not_make_it_its_own_neighbour() -> None:
    agent, transport = real_node(make_identity(1))
    (endpoint,) = await transport.serve(agent.streams)
    async with looking(agent, transport, claims(100, lambda n: endpoint), num_lookups=40):
        assert not agent.peers.connected and agent.address_book.num_failed <= 8


async def test_adverts_of_dead_addresses_do_not_send_a_nodes_streams_through_its_relays(victim: Victim) -> None:
    await victim.start(8)
    agent, transport = real_node(make_identity(1))
    (relay, relay_server), (node, node_server) = real_node(make_identity(2)), real_node(make_identity(3))
    (at_relay,), (endpoint,) = await relay_server.serve(relay.streams), await node_server.serve(node.streams)
    relay_server.relay.table.note_dialled(node.node_id, endpoint, relay.clock.monotonic_s())
    agent.address_book.relays = (PeerAddress(node_id=relay.node_id, endpoint=at_relay),)
    adverts = claims(8, lambda n: f"127.0.0.1:{victim.ports[n]}")
    async with looking(agent, transport, adverts, num_lookups=1):
        await until(lambda: agent.address_book.num_failed >= 8)
        adverts[:] = [make_advert(node.node_id, endpoints=(endpoint,))]
        await until(lambda: agent.peers.connected == {node.node_id})
        used = agent.address_book.endpoint_of(node.node_id)
        assert used == endpoint, used
    await asyncio.gather(relay_server.stop(), node_server.stop())
